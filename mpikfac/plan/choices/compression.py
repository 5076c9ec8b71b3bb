"""How values are encoded in messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mpikfac.plan.choices.choice import Choice, differing
from mpikfac.plan.choices.combinations import Combination, OneOf
from mpikfac.plan.codec import Codec
from mpikfac.plan.layout import Layout

if TYPE_CHECKING:
    from mpikfac.plan.of_rank import RankPlan


@dataclass(frozen=True, kw_only=True, repr=False)
class Compressor(Choice):
    """An encoding of the values in messages.

    Attributes:
        gradients_only: whether the encoding is only for reductions of gradients, not for factors
            and inverses.
        of_values: whether the encoding is also used for values that a rank sends unreduced; if not,
            it is used only in reductions.
    """

    gradients_only: ClassVar[bool] = False
    of_values: ClassVar[bool] = True

    @property
    def momentum(self) -> float:
        """The momentum that the encoding applies to gradients in place of the optimizer."""
        return 0.0

    def codec(self, layout: Layout, feedback: bool) -> Codec:
        """Return the encoding of an arena.

        Args:
            feedback: whether the encoding's error is added to the next values.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define codec()")

    def codec_of_sums(self, rank: RankPlan, layout: Layout) -> Codec:
        """Return the encoding for reductions of gradients, or of weight changes."""
        return self.codec(layout, True)

    def codec_of_gradients(self, rank: RankPlan, layout: Layout) -> Codec:
        """Return the encoding for reductions of gradients."""
        return self.codec_of_sums(rank, layout)

    def attach(self, site: Any, gradients: Any) -> Any:
        """Return the part of the trainer that acts in each step; None if none is needed.

        Args:
            site: the rank's `mpikfac.engine.Site`.
            gradients: the rank's `mpikfac.engine.Gradients`.
        """
        return None

    def described(self) -> str:
        """Return a description of the encoding."""
        return f"{self.name} values"


@dataclass(frozen=True, kw_only=True, repr=False)
class Compression:
    """How values are encoded in messages; None for no encoding.

    Attributes:
        gradients: the encoding of the gradients of covered layers, of preconditioned gradients and,
            with `shard_optimizer`, of weight updates.
        factors: the encoding of factors.
        inverses: the encoding of decompositions.
    """

    gradients: Compressor | None = None
    factors: Compressor | None = None
    inverses: Compressor | None = None

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if value is not None and not isinstance(value, Compressor):
                raise ValueError(
                    f"compression.{field}={value!r} must be a Compressor, such as BFloat16(), or "
                    f"None"
                )
        for field in ("factors", "inverses"):
            value = getattr(self, field)
            if value is not None and value.gradients_only:
                raise ValueError(
                    f"compression.{field}={value!r} must be BFloat16(), Int8() or None: it encodes "
                    f"only reductions of gradients"
                )

    def __repr__(self) -> str:
        """Return the call that constructs the value, omitting fields with default values."""
        return differing(self)


_PLAIN = {
    "transport.virtual_ranks": None,
    "transport.owner_sums": "reduce",
    "transport.balanced_shards": OneOf((None, False)),
}

NEEDS = tuple(
    Combination(
        f"compression.{field}",
        None,
        _PLAIN,
        "all ranks send compressed messages at the same time, as one buffer",
    )
    for field in ("factors", "inverses", "gradients")
)
"""What compressed messages require of other choices."""
