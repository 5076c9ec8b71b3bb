"""Compute on tensors with pure functions, and store tensors in flat buffers.

Names are imported on first use, so importing this package does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
