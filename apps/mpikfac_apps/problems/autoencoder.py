"""A deep autoencoder [Hinton & Salakhutdinov 2006], hard to train with first-order methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn


class Autoencoder(nn.Sequential):
    """A network that maps images `[n, channels, h, w]` to a logit for each pixel `[n, pixels]`.

    The encoder's layers have `widths` units, and the decoder mirrors it. Hidden units use tanh, and
    the code is linear. Biases are initialised to 0.

    Args:
        pixels: the number of pixel values per image, over all channels.
        widths: the number of units of each encoder layer; the last is the length of the code.
        draw: fills a weight matrix with random initial values.
    """

    def __init__(
        self, pixels: int, widths: Sequence[int], draw: Callable[[Tensor], Tensor]
    ) -> None:
        sizes = [pixels, *widths, *reversed(widths[:-1]), pixels]
        layers: list[nn.Module] = [nn.Flatten()]
        for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), start=1):
            linear = nn.Linear(inputs, outputs)
            draw(linear.weight)
            nn.init.zeros_(linear.bias)
            hidden = number not in (len(widths), len(sizes) - 1)
            layers += [linear, nn.Tanh()] if hidden else [linear]
        super().__init__(*layers)
