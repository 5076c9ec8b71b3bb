"""Compute on tensors with pure functions, and store tensors in flat buffers.

Names are imported on first use, so that types whose methods compute need no torch until then.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
