"""The lab: published methods that extend the core, one folder per method.

Import it to make its `Strategy` types and its named strategies available by name.

    import mpikfac.lab
    strategy, settings = mpikfac.get_strategy("parle")

The core does not import the lab, whose interface can change at any time. Code that runs during
training is imported on first use, so planning imports neither torch nor MPI.
"""

import lazy_loader

# These imports register the types by name, and add the named strategies.
from mpikfac.lab import catalogue as catalogue
from mpikfac.lab.quadratic_model.config import QuadraticModel as QuadraticModel

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
