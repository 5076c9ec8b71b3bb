"""Add the moments of each call of a layer to the sums that become factors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from mpikfac.engine.curvature.factors import Factors
from mpikfac.engine.curvature.recording.sums import (
    ExampleCounts,
    LayerSums,
    SideSums,
    Sum,
    bound_layers,
)
from mpikfac.engine.part import Part, PreconditionerPart
from mpikfac.layers import Layer
from mpikfac.numerics import without_autocast
from mpikfac.plan.names import STATISTICS
from mpikfac.settings import Estimator, Turn

log = logging.getLogger("mpikfac")


class Moments(Part):
    """Sums of `a a^T` and `g g^T`, or of `a` and `g`, over the calls since the last `finish`.

    If factors are overlapped, a layer's sums are sent as soon as the backward pass has left the
    layer.

    Attributes:
        of_loss: whether the gradients are those of the loss; otherwise, `KFAC.record` computes
            them.
        begin: where the chosen examples start, as a fraction of the distance between them, from 0
            to 1.
        vectors: the number of vectors in the passes of the batch, by layer; 0 for embeddings.
        chosen: the number of vectors that were chosen for the statistics, by layer.
        recorded: the names of layers with unfinished sums.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        factors: Factors,
        estimator: Estimator,
        observers: Sequence[PreconditionerPart] = (),
    ) -> None:
        """Bind the layers that have statistics on this rank to their sums.

        Args:
            observers: the parts that also record every call that counts.
        """
        super().__init__(factors.site)
        self.factors, self.estimator, self.of_loss = factors, estimator, estimator.of_loss
        self.statistics, self._observers = factors.statistics, observers
        self.begin = 0.0
        self._layers = bound_layers(layers, factors, estimator)
        self.recorded: set[str] = set()
        self._finished: set[str] = set()
        self._counted: dict[str, ExampleCounts] = {}  # the counts of finished layers
        self._uneven: set[str] = set()  # layers named in an earlier warning
        self.vectors, self.chosen = Counter[str](), Counter[str]()
        self._stage: Callable[[], AbstractContextManager[None]]  # measures the time of a call
        self._stage = partial(self.site.trace.stage, STATISTICS)

    def abort_batch(self) -> None:
        """Drop the calls since the last `finish`."""
        for sums in self._sums():
            sums.start_over()
        self.recorded.clear()
        self._finished.clear()
        self._counted.clear()
        self.vectors.clear()
        self.chosen.clear()
        self.statistics.flat.zero_()

    def drop_layer(self, name: str) -> None:
        """Drop the calls of a layer since the last `finish`."""
        for sums in self._layers[name]:
            sums.start_over()
            for side in sums.sides:
                for factor_sum in side.sums:
                    factor_sum.total.zero_()
        self.recorded.discard(name)
        del self.vectors[name], self.chosen[name]
        for observer in self._observers:
            observer.drop_layer(name)

    # -- properties ------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Layer]:
        """The layers with sums on this rank; a layer with groups appears once per group."""
        return [sums.layer for sums in self._sums()]

    @property
    def parameters(self) -> dict[str, Sequence[Tensor]]:
        """The parameters of each layer with sums on this rank, by name."""
        return {name: sums[0].layer.parameters for name, sums in self._layers.items()}

    @property
    def awaits_pass(self) -> bool:
        """Whether a call awaits another of the backward passes that replace the loss's own."""
        return any(sums.counts.vectors and not sums.complete for sums in self._sums())

    @property
    def examples(self) -> int:
        """The number of examples in the local batch since the last `finish`."""
        of_batch = [sums for sums in self._sums() if sums.layer.of_batch]
        return max((sums.counts.examples for sums in of_batch), default=0)

    @property
    def of_gradients(self) -> list[str]:
        """The names of statistics that are computed from gradients or their squares."""
        names = (
            factor_sum.factor.name
            for sums in self._sums()
            for side in sums.sides
            if side.quadratic
            for factor_sum in side.sums
        )
        return list(dict.fromkeys(names))  # groups have the same name

    def _sums(self) -> Iterator[LayerSums]:
        """Yield the sums of all layers and groups."""
        return chain.from_iterable(self._layers.values())

    # -- a call ----------------------------------------------------------------------------------

    @without_autocast
    def add(self, layer: Layer, x: Tensor, g: Tensor, forward_pass: int, turn: Turn | None) -> None:
        """Add the moments of a call to the layer's sums.

        Args:
            layer: the layer, or one of its groups.
            x: the inputs of the call.
            g: the gradients with respect to the outputs, from the current backward pass.
            forward_pass: the number of the call's forward pass.
            turn: describes the backward pass if it is one of several that replace the loss's pass;
                otherwise None.
        """
        sums, early = self._layers[layer.name][layer.group or 0], self.factors.sender.early
        self._begin(layer, x, turn)
        self.recorded.add(layer.name)
        if x.dim() < layer.dimensions:  # one example without a batch dimension
            x, g = x[None], g[None]
        with self._stage(), torch.no_grad():
            if len(x):  # an empty batch has 0 examples
                self._add(sums, x, g, forward_pass, turn)
            sums.complete = turn is None or turn.last
            complete = all(part.complete for part in self._layers[layer.name])
            if early and complete and not layer.of_part:
                self._finish_layers([layer.name])
                self.factors.ready(layer.name)

    def _begin(self, layer: Layer, x: Tensor, turn: Turn | None) -> None:
        """Begin a batch if the call is its first."""
        if self.recorded:
            return
        if not self._finished and self.factors.sender.early:
            self.factors.settle()
        if self.estimator.fisher_type == "type-2" and layer.of_batch and turn is not None:
            _check_rows(layer, len(x) if x.dim() >= layer.dimensions else 1, turn.rows)

    def _add(
        self, sums: LayerSums, x: Tensor, g: Tensor, forward_pass: int, turn: Turn | None
    ) -> None:
        """Add one call's moments to the sums of a layer."""
        layer, first = sums.layer, turn is None or turn.first
        dtype = g.dtype if g.dtype in sums.rounded else self.site.dtype
        if x.is_floating_point():  # under autocast, the layer has multiplied rounded inputs
            x = x.to(g.dtype).to(dtype)
        g = g.to(dtype)
        vectors, prepared = layer.positions(g), layer.prepared(x, g)
        of_layer = 0 if layer.group else vectors  # counted for the first group only
        if first:
            sums.counts.add(len(x), vectors, forward_pass)
            self.vectors[layer.name] += of_layer * x.is_floating_point()
        chosen = sums.subsample.of(len(x), vectors, self.begin)
        chosen_x, chosen_g = prepared[chosen], g[chosen]
        weight = len(x) / max(1, len(chosen_x))
        self.chosen[layer.name] += of_layer * len(chosen_x) // len(x)
        of_squares = self._weight_of_squares(sums, len(x), weight, turn)
        sides = [side for side in sums.sides if side.quadratic or first]
        self._take(sides, chosen_x, chosen_g, weight, of_squares)
        for observer in self._observers:
            observer.record(layer, chosen_x, chosen_g, of_squares)

    def _weight_of_squares(
        self, sums: LayerSums, examples: int, weight: float, turn: Turn | None
    ) -> float:
        """Return the weight of squared gradients if moments of inputs have the weight `weight`."""
        layer = sums.layer
        if turn is None:
            power = (0.5 if sums.vector else 1.0) * (2 if layer.of_part else 1)
            return weight * self.estimator.num_per_example_loss_terms**power
        # The loss is a mean over this pass only, not over all microbatches.
        if layer.of_part:
            return turn.weight * weight * (turn.rows * turn.terms)
        return turn.weight * weight * (examples * (turn.rows if layer.of_batch else examples))

    def _take(self, sides: Iterable[SideSums], x: Tensor, g: Tensor, *weights: float) -> None:
        """Add a call's moments of inputs and of gradients, times their `weights`, to the sums."""
        for side in sides:
            for factor_sum, moment in zip(side.sums, side.moments(side.layer, x, g)):
                factor_sum.add(moment, weights[side.quadratic])

    def end_pass(self) -> None:
        """End a backward pass; in this class, nothing is left to add."""

    # -- a batch ---------------------------------------------------------------------------------

    def finish(self) -> dict[str, bool]:
        """Turn the sums into the rank's factors, multiplied by the number of examples.

        Returns:
            For each layer with statistics on this rank, whether it was called in a training pass.

        Raises:
            RuntimeError: no layer has statistics.
        """
        if self._layers and not self.recorded and not self._finished:
            missing = "" if self.of_loss else "; call record(outputs) before the loss's backward()"
            raise RuntimeError(
                f"no covered layer took part in the training passes before this step, so there are "
                f"no statistics (a pass counts only in train() mode, with a nonempty batch, and if "
                f"backward() is called outside of torch.func transforms){missing}"
            )
        seen = {name: name in self.recorded | self._finished for name in self._layers}
        left = [name for name in self._layers if name not in self._finished]
        of_part = [name for name in left if self._layers[name][0].layer.of_part]
        self._finish_layers([name for name in left if name not in of_part])
        self._finish_layers(of_part)  # now that the batch's number of examples is known
        self._finished.clear()
        self._check_counts()
        return seen

    def _finish_layers(self, names: Collection[str]) -> None:
        """Turn the sums of layers into factors; without examples, the sums stay 0."""
        self._finished.update(names)
        self.recorded.difference_update(names)
        scaled = [each for name in names for each in self._scales(name)]
        if scaled:
            sums, scales, _ = zip(*scaled)
            torch._foreach_mul_([each.total for each in sums], scales)
            # Once per factor: a factor can have several sums, for parts of a layer.
            counted = {each.factor.counted: (each.count, batch) for each, _, batch in scaled}
            counts, batches = map(list, zip(*counted.values()))
            torch._foreach_zero_(counts)
            torch._foreach_add_(counts, batches)

    def _scales(self, name: str) -> Iterator[tuple[Sum, float, float]]:
        """Yield a layer's sums, the scales that turn them into factors, and the example count."""
        normalization = self.estimator.normalization
        for sums in self._layers[name]:
            counts = sums.counts
            sums.start_over()
            if (vectors := counts.vectors) == 0:
                continue
            batch, self._counted[name] = counts.examples, counts
            scales = sums.layer.scales(normalization, batch, vectors, sums.vector)
            for side in sums.sides:
                scale = scales[side.side] * batch
                if side.quadratic and not self.of_loss:
                    scale /= batch**2  # the sums contain gradients of the examples' own losses
                elif side.quadratic and sums.layer.of_part:  # the loss is a mean over the batch
                    scale *= (self._examples() / batch) ** (1 if sums.vector else 2)
                for factor_sum in side.sums:
                    yield factor_sum, scale, float(batch)

    def _examples(self) -> int:
        """Return the number of examples seen by layers that are applied to the whole batch."""
        counted = self._counted.items()
        whole = [c.examples for name, c in counted if self._layers[name][0].layer.of_batch]
        return max(whole or [c.examples for _, c in counted])

    def _check_counts(self) -> None:
        """Warn once about layers whose example counts differ although their pass counts agree."""
        finished, self._counted = self._counted, {}
        alike: dict[int, dict[int, list[str]]] = {}  # by numbers of passes and examples
        for name, counts in finished.items():
            if self._layers[name][0].layer.of_batch:
                alike.setdefault(counts.passes, {}).setdefault(counts.examples, []).append(name)
        for sets in alike.values():
            if len(sets) > 1 and not self._uneven.issuperset(chain(*sets.values())):
                self._uneven.update(chain(*sets.values()))
                _warn_of_counts(sets)


def _warn_of_counts(sets: Mapping[int, Sequence[str]]) -> None:
    """Warn that layers saw different numbers of a batch's examples; `sets` has layers by number."""
    seen = [
        f"{number} examples by {', '.join(map(repr, names[:3]))}{' ...' * (len(names) > 3)}"
        for number, names in sorted(sets.items())
    ]
    log.warning(
        "layers received different numbers of examples from the same batch: %s. The first "
        "dimension of a layer's input must be the batch; if it is not, the layer's curvature is "
        "wrong and depends on the number of ranks; use batch_first=True, or name such layers in "
        "coverage=mpikfac.Coverage(skip=[...]); name layers of experts, or of nodes of graphs, in "
        "part_of_batch=[...] (the loss is a mean over the batch), and layers of boxes in "
        "own_examples=[...] (the loss is a mean over the boxes)",
        "; ".join(seen),
    )


def _check_rows(layer: Layer, examples: int, rows: int) -> None:
    """Check that the number of rows of the outputs equals the number of examples.

    Raises:
        ValueError: outputs have a row for each position, so the gradients of positions would mix.
    """
    if rows != examples:
        raise ValueError(
            f"fisher_type='type-2' needs one row of outputs per example, but record() got {rows} "
            f"rows, and layer {layer.name!r} saw {examples} examples; use "
            f"estimator=mpikfac.Estimator(fisher_type='mc')"
        )
