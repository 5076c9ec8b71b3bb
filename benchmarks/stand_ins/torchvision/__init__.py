"""Stand in for torchvision: the 1,797 digits of mpikfac's programs, and transforms of tensors."""

from . import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
