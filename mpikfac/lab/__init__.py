"""The laboratory: methods of papers beside the core, one folder a method.

Import it to know its methods by name: types of `Strategy`, and named strategies.

    import mpikfac.lab
    strategy, settings = mpikfac.get_strategy("parle")

The core imports nothing of it. It promises no stability. What takes part in training is imported on
first use, so that planning imports neither torch nor MPI.
"""

import lazy_loader

# These imports make the types known by name, and add the named strategies.
from mpikfac.lab import catalogue as catalogue
from mpikfac.lab.quadratic_model.config import QuadraticModel as QuadraticModel

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
