"""Limit how many operations K-FAC adds to those of the forward and backward passes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from mpikfac.plan import (
    Form,
    LayerShape,
    Operations,
    PlannedLayer,
    Seen,
    Strategy,
    check_count,
    check_positive,
    default_rule,
    make_plain,
)
from mpikfac.plan import operations as operations_of
from mpikfac.settings.schedule import SETTLED, Schedule, evaluate
from mpikfac.settings.usual import Intervals

AT_FIRST = 1.0  # the minimum of a budget's `share` before step `SETTLED`
LEAST_PASSES = 2**27  # multiplications in the passes; with fewer, a step mostly does other things
LEAST_BLOCK = 128
WIDE = 1024  # factors up to this order are not cut before the first batch is known


class Updates(NamedTuple):
    """The average number of updates of factors, and of decompositions, per step."""

    factors: float
    bases: float


@dataclass
class Budget:
    """Cut factors and lengthen intervals, so that K-FAC stays cheap compared to a batch's passes.

    Cutting factors bounds the cost of directions, and longer intervals bound that of updates. Cuts
    and intervals depend only on the plan and the first batch with statistics, over all ranks
    together, so they are the same on all machines, on any number of ranks, and after a restart.

    Args:
        share: the maximum number of operations for statistics and decompositions, averaged over an
            interval and relative to the operations of the forward and backward passes; at least 1
            during the first 160 steps. None for no limit.
        cuts: whether factors may be cut into blocks.

    Raises:
        ValueError: `share` is not positive.

    Attributes:
        seen: the numbers of vectors of each layer in the first batch; empty before this batch.
        operations: the operation counts of each layer; empty before the first batch.
        total: the operation counts of all layers together.
    """

    share: float | None = 0.3
    cuts: bool = False
    seen: dict[str, Seen] = field(default_factory=dict)
    operations: dict[str, Operations] = field(default_factory=dict)
    total: Operations = field(default_factory=Operations)

    def __post_init__(self) -> None:
        make_plain(self)
        if self.share is not None:
            check_positive("budget", self.share)

    # -- cuts ------------------------------------------------------------------------------------

    def cut(self, layer: LayerShape, spatial: bool = False) -> LayerShape:
        """Return the layer with its factors cut into blocks.

        A block has at most 128 rows or, if that is more, half as many rows as the layer has vectors
        in the first batch. With larger blocks, a direction would cost more than the passes of the
        layer, and a batch would have too few vectors to estimate the blocks. Layers without vectors
        in the batch, such as embeddings, stay whole. Before the first batch, only layers with a
        factor of more than 1,024 rows are cut, and only if their vectors are not patches.

        Args:
            layer: a layer with whole factors.
            spatial: whether vectors are patches, of which a batch contains many.
        """
        if not self.cuts:
            return layer
        order, largest = max((factor.order for factor in layer.factors), default=0), LEAST_BLOCK
        if (seen := self.seen.get(layer.name)) is None:
            whole = spatial or order <= WIDE
        else:
            whole, largest = not seen.vectors, max(LEAST_BLOCK, seen.vectors // 2)
        if whole:
            return layer
        return replace(layer, largest=largest) if order > largest else layer

    def count(self, layers: Iterable[PlannedLayer], orthogonal: bool) -> None:
        """Count the operations of the layers from the sizes of the first batch."""
        self.operations = {
            layer.name: operations_of(
                layer.shape, layer.preconditioner, self.seen[layer.name], orthogonal
            )
            for layer in layers
            if layer.name in self.seen
        }
        self.total = sum(self.operations.values(), start=Operations())

    # -- intervals -------------------------------------------------------------------------------

    def stretched(self, usual: Intervals) -> Intervals:
        """Multiply the intervals by the smallest whole number that satisfies the budget."""
        at_first, settled = (Updates(*(_updates(each, end) for each in usual)) for end in (0, 1))

        def longer(interval: Schedule) -> Schedule:
            def value(step: int) -> float:
                updates = settled if step >= SETTLED else at_first
                return evaluate(interval, step) * self._stretch(updates, step)

            return value

        return Intervals(*map(longer, usual))

    def _stretch(self, updates: Updates, step: int) -> int:
        """Return the smallest whole multiplier of intervals that keeps `updates` in the budget."""
        if self.share is None or not self.operations:
            return 1
        share = self.share if step >= SETTLED else max(AT_FIRST, self.share)
        allowed = share * max(LEAST_PASSES, self.total.passes)
        return max(1, math.ceil(self.total.updates(*updates) / allowed))

    # -- state -----------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the sizes of the first batch as text, or "" before the first batch."""
        return json.dumps({n: asdict(s) for n, s in self.seen.items()}) if self.seen else ""


def budget_of(
    share: float | None,
    intervals: Iterable[float | Schedule | None],
    form: Form,
    rule: Callable[[LayerShape], LayerShape],
    strategy: Strategy,
) -> Budget:
    """Return the budget of a run; it does not change intervals or factors set by the user.

    Args:
        intervals: the intervals set by the user, a strategy or a preconditioner; None for the
            default.
        form: the form of the run's preconditioner.
        rule: the function that sets the form of each layer's factors; see `Coverage`.
    """
    free = share is not None and all(interval is None for interval in intervals)
    of_vectors = form.of == "statistics" and form.keeps == "matrix" and not form.rescaled
    # Cutting factors after the first batch requires parts of the trainer that can be rebuilt.
    fixed = strategy.refresh.servers or strategy.sync.local_steps
    cuts = free and of_vectors and rule is default_rule and not fixed
    return Budget(share if free else None, cuts)


def seen_in(text: str) -> dict[str, Seen]:
    """Parse the sizes of a run's first batch, as returned by `Budget.text`.

    Raises:
        ValueError: the text does not contain valid counts of vectors.
    """
    try:
        seen = {name: Seen(**counts) for name, counts in json.loads(text or "{}").items()}
        for each in seen.values():
            check_count("vectors", each.vectors, 0)
            check_count("chosen", each.chosen, 0)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"item 'kfac/seen' does not contain valid counts of vectors: {error}"
        ) from error
    return seen


def _updates(interval: Schedule, settled: int) -> float:
    """Return the updates per step from step 160 on if `settled`, otherwise the mean before it."""
    steps = [SETTLED] if settled else range(SETTLED)
    return sum(1 / evaluate(interval, step) for step in steps) / len(steps)


def cost(
    operations: Mapping[str, Operations],
    shapes: Mapping[str, LayerShape],
    factor_update_steps: float | Schedule,
    inv_update_steps: float | Schedule,
) -> tuple[float, str]:
    """Return a step's operations relative to those of its passes, and a line with this ratio.

    Uses the intervals from step 160 on, when they no longer grow.
    """
    updates = [1 / evaluate(each, SETTLED) for each in (factor_update_steps, inv_update_steps)]
    added = {name: one.direction + one.updates(*updates) for name, one in operations.items()}
    passes, total = sum(one.passes for one in operations.values()), sum(added.values())
    if not passes or not total:
        return 1.0, ""
    times, largest = 1 + total / passes, max(added, key=added.__getitem__)
    orders = [factor.order for factor in shapes[largest].factors]
    whole = max(shapes[largest].inputs, shapes[largest].outputs)
    blocks = f", in blocks of at most {max(orders)}" if orders and max(orders) < whole else ""
    return times, (
        f"K-FAC: {times:.2g} times SGD's operations per step; layer {largest} accounts for "
        f"{added[largest] / total:.0%} of what K-FAC adds (order {whole}{blocks})"
    )
