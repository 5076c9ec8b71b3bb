"""Hooks that record a batch's moments; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.layers import Layer
from mpikfac.numerics import Arena, add_triangle, without_autocast
from mpikfac.plan import count_of
from mpikfac.settings import Estimator, Turn
from mpikfac.trace import Trace


class Recorder:
    """Sums of `a a^T` and `g g^T`, or of `a` and `g`, over passes since the last `finish`.

    Attributes:
        recording: whether passes count; changes take effect at the next forward pass.
        before_first: called before the first sums since the last `finish` are added.
        after_each: called with each layer whose sums were added.
        after_call: called with each layer, its call's inputs and output gradients as sums take
            them, and the weight of these.
    """

    recording = False
    before_first: Callable[[], None] | None = None
    after_each: Callable[[Layer], None] | None = None
    after_call: Callable[[Layer, Tensor, Tensor, float], None] | None = None
    _passes = 0
    _turn: Turn | None = None

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        statistics: Arena,
        trace: Trace,
        estimator: Estimator,
        vectors: Collection[str] = (),
    ) -> None:
        """Adds hooks to the model and to the layers that have a block in `statistics`.

        Of the layers in `vectors`, sums are those of `a` and `g`, else triangles of `a a^T` and
        `g g^T`.
        """
        self.statistics = statistics
        self.vectors = vectors
        self.estimator = estimator
        self.trace = trace
        self._counts: dict[str, Count] = {}
        self._finished: set[str] = set()
        self.layers = [
            layer for layer in layers if any(f.name in statistics for f in layer.shape.factors)
        ]
        self._hooks = [model.register_forward_pre_hook(self._on_pass)]
        self._hooks += [
            module.register_forward_hook(partial(self._on_forward, layer), with_kwargs=True)
            for layer in self.layers
            for module in layer.modules
        ]

    def __reduce__(self) -> Any:
        # A copied or saved model takes its hooks along; those record nothing.
        return Recorder.__new__, (Recorder,)

    def detach(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forgets the passes since the last `finish`."""
        self._counts.clear()
        self._finished.clear()
        self.statistics.flat.zero_()

    def finish(self) -> None:
        """Turns the sums into this rank's factors, each times the number of its examples.

        Raises:
            RuntimeError: no layer has statistics.
        """
        if self.layers and not self._counts and not self._finished:
            of_loss = self.estimator.of_loss
            missing = "" if of_loss else "; call record(outputs) before the loss's backward()"
            raise RuntimeError(
                f"no covered layer took part in the training passes before this step (train() "
                f"mode, a batch that is not empty, backward), so there are no statistics{missing}"
            )
        for layer in self.layers:
            if layer.name not in self._finished:
                self.finish_layer(layer)
        self._finished.clear()

    def finish_layer(self, layer: Layer) -> None:
        """Does that for one layer; one that took no part counts for nothing."""
        self._finished.add(layer.name)
        count = self._counts.pop(layer.name, None)
        if count is None or count.positions == 0:
            return
        counts = count.batch, count.positions
        scales = layer.scales(self.estimator.normalization, *counts, layer.name in self.vectors)
        for side in layer.shape.sides:
            scale = scales[side] * count.batch
            if side in layer.quadratic and not self.estimator.of_loss:
                scale /= count.batch**2  # sums are of gradients of examples' own losses
            for factor in layer.shape.side(side):
                if factor.name in self.statistics:
                    self.statistics[factor.name].mul_(scale)
                    self.statistics[count_of(factor.name)].fill_(count.batch)

    @property
    def of_gradients(self) -> list[str]:
        """The statistics that are sums of gradients, or of their squares."""
        return [
            factor.name
            for layer in self.layers
            for side in layer.quadratic
            for factor in layer.shape.side(side)
            if factor.name in self.statistics
        ]

    @contextmanager
    def standing_for(self, turn: Turn) -> Iterator[None]:
        """Inside, backward passes are some of several that stand for the loss's."""
        self._turn = turn
        try:
            yield
        finally:
            self._turn = None

    def _on_pass(self, *_: object) -> None:
        self._passes += 1

    def _on_forward(
        self, layer: Layer, module: nn.Module, inputs: Any, named: dict[str, Any], output: Any
    ) -> None:
        if not (self.recording and module.training):
            return
        call = layer.watch(inputs, named, output)
        if call is not None:
            x, listen = call
            listen(partial(self._record, layer, [x.detach()], self._passes))

    @without_autocast
    def _record(self, layer: Layer, kept: list[Tensor], forward_pass: int, g: Tensor) -> None:
        """Adds one call's sums; `kept` holds its input until then."""
        turn = self._turn or Turn()
        if self._turn is None and not self.estimator.of_loss:
            kept.clear()
            return
        if not kept:
            raise RuntimeError(
                f"layer {layer.name!r}: a second backward pass through one forward pass has no "
                f"statistics of its own; add the losses and call backward once"
            )
        x = kept.pop() if turn.last else kept[0]
        if self.before_first and not self._counts and not self._finished:
            self.before_first()
        if x.dim() < layer.dimensions:  # one example without a batch dimension
            x, g = x[None], g[None]
        dtype = self.statistics.flat.dtype
        if x.is_floating_point():  # under autocast, what the layer multiplied was rounded
            x = x.to(g.dtype).to(dtype)
        g = g.to(dtype)
        with self.trace.stage("statistics"), torch.no_grad():
            count = self._counts.setdefault(layer.name, Count())
            if turn.first:
                count.add(len(x), layer.positions(g), forward_pass)
            every = slice(None, None, self.estimator.subsample)
            some_x, some_g = layer.prepared(x, g)[every], g[every]
            weight = len(x) / max(1, len(some_x))
            # What stands for the loss is a mean over this pass alone, not over all micro-batches.
            of_own = 1 if self._turn is None else len(x) ** 2
            for side in layer.shape.sides:
                if side in layer.quadratic:
                    self._add(layer, side, some_x, some_g, turn.weight * weight * of_own)
                elif turn.first:
                    self._add(layer, side, some_x, some_g, weight)
            if self.after_call:
                self.after_call(layer, some_x, some_g, turn.weight * weight * of_own)
            if self.after_each and turn.last:
                self.after_each(layer)

    def _add(self, layer: Layer, side: str, x: Tensor, g: Tensor, weight: float) -> None:
        """Adds the first or second moment of a side, times `weight`, to its factors' statistics."""
        factors = layer.shape.side(side)
        if not any(factor.name in self.statistics for factor in factors):
            return
        vectors = layer.name in self.vectors
        moment = layer.first_moment if vectors else layer.second_moment
        total, start = moment(side, x, g), 0
        for factor in factors:
            block = slice(start, start + factor.order) if len(factors) > 1 else slice(None)
            start += factor.order
            if factor.name not in self.statistics:
                continue
            mine = self.statistics[factor.name]
            if vectors:
                mine.add_(total[..., block].view_as(mine), alpha=weight)
            else:
                own = (*mine.shape[:-2], factor.order, factor.order)
                add_triangle(mine, total[..., block, block].reshape(own), weight)


@dataclass
class Count:
    """How many examples and vectors went into a layer's sums."""

    batch: int = 0
    positions: int = 0
    last_pass: int = -1

    def add(self, batch: int, positions: int, forward_pass: int) -> None:
        """Counts one call of the layer."""
        # A layer called again in the same pass sees the same examples at more positions.
        if forward_pass != self.last_pass:
            self.batch += batch
        self.positions += positions
        self.last_pass = forward_pass
