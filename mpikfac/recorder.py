"""Hooks that record a batch's moments; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac import kron
from mpikfac.arena import Arena
from mpikfac.layers import Layer
from mpikfac.moments import Normalization, factor_scales, vector_scales
from mpikfac.trace import Trace

Moment = Callable[[Tensor], Tensor]


class Recorder:
    """Sums of `a a^T` and `g g^T`, or of `a` and `g`, over passes since the last `finish`.

    Attributes:
        recording: whether passes count; changes take effect at the next forward pass.
        before_first: called before the first sums since the last `finish` are added.
        after_each: called with each layer whose sums were added.
    """

    recording = False
    before_first: Callable[[], None] | None = None
    after_each: Callable[[Layer], None] | None = None
    _passes = 0

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        statistics: Arena,
        trace: Trace,
        subsample: int = 1,
        vectors: bool = False,
    ) -> None:
        """Adds hooks to the model and to the layers that have a block in `statistics`.

        With `subsample=n`, a call's sums are estimated from every n-th of its examples. With
        `vectors`, they are those of `a` and `g`, else triangles of `a a^T` and `g g^T`.
        """
        self.statistics = statistics
        self.vectors = vectors
        self.subsample = subsample
        self.trace = trace
        self._counts: dict[str, Count] = {}
        self._finished: set[str] = set()
        self.layers = [layer for layer in layers if any(n in statistics for n in layer.factors)]
        self._hooks = [model.register_forward_pre_hook(self._on_pass)]
        self._hooks += [
            layer.module.register_forward_hook(partial(self._on_forward, layer), with_kwargs=True)
            for layer in self.layers
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

    def finish(self, normalization: Normalization, sharers: int) -> None:
        """Turns the sums into this rank's share of the factors' mean over `sharers` ranks.

        Raises:
            RuntimeError: a layer has no statistics.
        """
        for layer in self.layers:
            if layer.name not in self._finished:
                self.finish_layer(layer, normalization, sharers)
        self._finished.clear()

    def finish_layer(self, layer: Layer, normalization: Normalization, sharers: int) -> None:
        """Does that for one layer.

        Raises:
            RuntimeError: it has no statistics.
        """
        count = self._counts.pop(layer.name, None)
        if count is None or count.positions == 0:
            raise RuntimeError(
                f"layer {layer.name!r} took no part in the training passes before this step "
                f"(train() mode, a batch that is not empty, backward), so it has no "
                f"statistics; add it to skip if that is meant"
            )
        self._finished.add(layer.name)
        scales = count.scales(normalization, layer.spatial, self.vectors)
        for name, scale in zip(layer.factors, scales):
            if name in self.statistics:
                self.statistics[name].mul_(scale / sharers)

    def _on_pass(self, *_: object) -> None:
        self._passes += 1

    def _on_forward(
        self, layer: Layer, module: nn.Module, inputs: Any, named: dict[str, Any], output: Tensor
    ) -> None:
        # The hook sits on the output tensor, not on the module: an in-place activation behind a
        # layer breaks module backward hooks, and a pass without a backward records nothing.
        if self.recording and module.training and output.requires_grad:
            if output.dtype != self.statistics.flat.dtype:
                raise TypeError(
                    f"layer {layer.name!r} computes in {output.dtype}, its weight is "
                    f"{self.statistics.flat.dtype}; mixed precision is not covered, turn it off"
                )
            x = inputs[0] if inputs else named["input"]
            output.register_hook(partial(self._record, layer, [x.detach()], self._passes))

    def _record(self, layer: Layer, kept: list[Tensor], forward_pass: int, g: Tensor) -> None:
        """Adds one call's sums; `kept` holds its input until then."""
        if not kept:
            raise RuntimeError(
                f"layer {layer.name!r}: a second backward pass through one forward pass has no "
                f"statistics of its own; add the losses and call backward once"
            )
        x = kept.pop()
        if self.before_first and not self._counts and not self._finished:
            self.before_first()
        if x.dim() < (4 if layer.spatial else 2):  # one example without a batch dimension
            x, g = x[None], g[None]
        with self.trace.stage("statistics"), torch.no_grad():
            count = self._counts.setdefault(layer.name, Count())
            count.add(len(x), layer.positions(g), forward_pass)
            some_x, some_g = x[:: self.subsample], g[:: self.subsample]
            weight = len(x) / max(1, len(some_x))
            a_name, g_name = layer.factors
            if a_name in self.statistics:
                self._add(a_name, layer.input_vector, layer.input_sum, some_x, weight)
            if g_name in self.statistics:
                self._add(g_name, layer.output_vector, layer.output_sum, some_g, weight)
            if self.after_each:
                self.after_each(layer)

    def _add(self, name: str, first: Moment, second: Moment, some: Tensor, weight: float) -> None:
        """Adds the first or second moment of `some`, times `weight`, to a factor's statistics."""
        if self.vectors:
            self.statistics[name].add_(first(some), alpha=weight)
        else:
            kron.add_triangle(self.statistics[name], second(some), weight)


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

    def scales(
        self, normalization: Normalization, spatial: bool, vectors: bool
    ) -> tuple[float, float]:
        """What to multiply the sums by to get A and G, or their vectors."""
        batch = self.batch if spatial or normalization == "expand" else self.positions
        scales = vector_scales if vectors else factor_scales
        return scales(normalization, batch, self.positions / batch)
