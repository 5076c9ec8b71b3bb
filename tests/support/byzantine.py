"""Attacks on training: what faulty ranks send, knowing the gradients of all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

from torch import Tensor

SHRINK = 0.5  # for "inner product": short vectors are close to those of the correct ranks
RESCALED = 0.6  # for "rescaled": short enough to stay below a safeguard's threshold for long
DELAY = 100  # for "delayed", in steps


def flipped(labels: Tensor, classes: int) -> Tensor:
    """Return the labels in reverse order, as of a rank with wrong data."""
    return classes - 1 - labels


def sign_flip(right: Tensor, wrong: int) -> Tensor:
    """Return vectors `[wrong, n]` that point against the correct ranks' mean."""
    return -right.mean(0).expand(wrong, -1)


def little_is_enough(right: Tensor, wrong: int) -> Tensor:
    """Return vectors as far off as the correct ranks' spread allows [Baruch et al. 2019].

    So many correct ranks are farther from the mean that, with the faulty ranks, they form a
    majority.
    """
    ranks = len(right) + wrong
    needed = ranks // 2 + 1 - wrong
    reach = NormalDist().inv_cdf((len(right) - needed) / len(right))
    return (right.mean(0) - reach * right.std(0)).expand(wrong, -1)


def inner_product(right: Tensor, wrong: int) -> Tensor:
    """Return short vectors that point against the correct ranks' mean [Xie et al. 2019]."""
    return -SHRINK * right.mean(0).expand(wrong, -1)


def delayed(own: Sequence[Tensor]) -> Tensor:
    """Return the faulty ranks' old vectors: from `DELAY` steps ago, or their first ones.

    [Allen-Zhu et al. 2021]
    """
    return own[max(0, len(own) - 1 - DELAY)]


def rescaled(own: Sequence[Tensor]) -> Tensor:
    """Return the faulty ranks' own vectors, shortened and reversed [Allen-Zhu et al. 2021]."""
    return -RESCALED * own[-1]


OF_GRADIENTS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "sign flip": sign_flip,
    "a little is enough": little_is_enough,
    "inner product": inner_product,
}
"""Attacks by name, from the correct ranks' vectors `[right, n]` to vectors `[wrong, n]`."""
OF_OWN: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "delayed": delayed,
    "rescaled": rescaled,
}
"""Attacks by name, from the faulty ranks' own vectors `[wrong, n]` of all steps so far."""
