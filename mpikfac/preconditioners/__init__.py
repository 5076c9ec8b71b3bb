"""Turn factors into decompositions, and gradients into directions, with one type per method.

The types import neither torch nor MPI, because programs use them to print help; the functions that
a type calls are imported inside its methods.
"""

import lazy_loader

# This import registers the types by name.
from mpikfac.preconditioners import registry as registry

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
