"""The configuration of PowerSGD [Vogels et al. 2019]."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mpikfac.lab.power_sgd.codec import PowerSGDCodec, matrix
from mpikfac.plan import Compressor, check_count, make_plain

if TYPE_CHECKING:
    from mpikfac.plan import Layout, RankPlan


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Compressor):
    """Reduce thin matrices instead of full ones [PowerSGD, Vogels et al. 2019].

    Values that are sent without a reduction are not encoded.

    Attributes:
        matrix_approximation_rank: the number of columns of the thin matrices.
    """

    name: ClassVar[str] = "power-sgd"
    gradients_only: ClassVar[bool] = True
    of_values: ClassVar[bool] = False

    matrix_approximation_rank: int = 2

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("matrix_approximation_rank", self.matrix_approximation_rank, 1)

    def codec(self, layout: Layout, feedback: bool) -> PowerSGDCodec:
        """Return the encoding without matrices, which `codec_of_sums` adds."""
        return PowerSGDCodec(feedback=feedback, rank=self.matrix_approximation_rank)

    def codec_of_sums(self, rank: RankPlan, layout: Layout) -> PowerSGDCodec:
        """Return the encoding for reductions of gradients, or of weight changes."""
        layers = {layer.name for layer in rank.layers}
        matrices = [
            matrix(layout.offsets[name], layout.shapes[name], name in layers)
            for name in layout.offsets
            if name in rank.messages_of and math.prod(layout.shapes[name]) > 0
        ]
        return replace(self.codec(layout, True), matrices=tuple(matrices))

    def described(self) -> str:
        """Return a description of the encoding."""
        return f"rank {self.matrix_approximation_rank}"
