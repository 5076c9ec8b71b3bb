"""Stand in for torchvision's pictures: none is drawn."""

from typing import Any


def save_image(*_: Any, **__: Any) -> None:
    """Draw nothing."""
