"""Attacks on training: what wrong ranks send, knowing the gradients of all right ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

from torch import Tensor

SHRINK = 0.5  # of "inner product": short vectors are close to those of the right ranks
RESCALED = 0.6  # of "rescaled": short enough to stay below a safeguard's threshold for long
DELAY = 100  # of "delayed", in steps


def flipped(labels: Tensor, classes: int) -> Tensor:
    """Return the labels in reverse order: a rank with wrong data."""
    return classes - 1 - labels


def sign_flip(right: Tensor, wrong: int) -> Tensor:
    """Return vectors against the right ranks' mean `[wrong, n]`."""
    return -right.mean(0).expand(wrong, -1)


def little_is_enough(right: Tensor, wrong: int) -> Tensor:
    """Return vectors as far off as possible inside the right ranks' spread [Baruch et al. 2019].

    Enough right ranks are farther from the mean that they and the wrong ranks form a majority.
    """
    ranks = len(right) + wrong
    needed = ranks // 2 + 1 - wrong
    reach = NormalDist().inv_cdf((len(right) - needed) / len(right))
    return (right.mean(0) - reach * right.std(0)).expand(wrong, -1)


def inner_product(right: Tensor, wrong: int) -> Tensor:
    """Return short vectors against the right ranks' mean [Xie et al. 2019]."""
    return -SHRINK * right.mean(0).expand(wrong, -1)


def delayed(own: Sequence[Tensor]) -> Tensor:
    """Return the wrong ranks' own vectors of long ago, or the first [Allen-Zhu et al. 2021]."""
    return own[max(0, len(own) - 1 - DELAY)]


def rescaled(own: Sequence[Tensor]) -> Tensor:
    """Return the wrong ranks' own vectors, shortened and reversed [Allen-Zhu et al. 2021]."""
    return -RESCALED * own[-1]


OF_GRADIENTS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "sign flip": sign_flip,
    "a little is enough": little_is_enough,
    "inner product": inner_product,
}
"""Attacks by name: from the right ranks' vectors `[right, n]` to vectors `[wrong, n]`."""
OF_OWN: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "delayed": delayed,
    "rescaled": rescaled,
}
"""Attacks by name, from the wrong ranks' own vectors `[wrong, n]` of all steps so far."""
