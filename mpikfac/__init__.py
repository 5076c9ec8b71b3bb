"""mpikfac: training CNNs with distributed K-FAC under MPI.

Names are imported on first use, so planning (`mpikfac.make_plan`) does not start MPI.
"""

from importlib import metadata

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = metadata.version(__name__)
