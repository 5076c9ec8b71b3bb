"""Write and read checkpoints, which are either complete or absent.

Names are imported on first use, so that reading a checkpoint does not start MPI.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
