"""Hooks that record a batch's moments; without overlap, nothing is sent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from mpikfac.engine.curvature.eager import Eagerly
from mpikfac.engine.curvature.factors import Factors
from mpikfac.engine.curvature.recording.comparison import Comparison
from mpikfac.engine.curvature.recording.own_outputs import OwnOutputs
from mpikfac.engine.part import Part, PreconditionerPart
from mpikfac.layers import SIDE_BY_SIDE, Attached, Hook, Layer
from mpikfac.numerics import (
    ADDED_IN_FLOAT32,
    add_triangle,
    at_end_of_backward,
    in_backward,
    listen,
    makes_gradients,
    outside_of_transforms,
    without_autocast,
)
from mpikfac.plan import Factor, PlannedLayer
from mpikfac.plan.names import STATISTICS
from mpikfac.settings import Estimator, Subsample, Turn

log = logging.getLogger("mpikfac")


class Held(NamedTuple):
    """The gradients of a layer after a backward pass.

    Attributes:
        versions: identities, and how often each gradient was changed in place.
        sizes: the norms, which no host waits for.
    """

    versions: list[tuple[int, int]]
    sizes: Sequence[Tensor]


@dataclass(frozen=True)
class Sum:
    """The sum of a factor, bound to its place in the arena of statistics.

    Attributes:
        block: where the factor lies in the moment of its side.
        total: the sum: a triangle or a vector.
        count: `[1]`, the number of examples in the sum.
    """

    factor: Factor
    block: slice
    total: Tensor
    count: Tensor

    def add(self, moment: Tensor, weight: float) -> None:
        """Add the moment of a call, times `weight`."""
        total = self.total
        if self.factor.preconditioner.vector:
            total.add_(moment.view_as(total), alpha=weight)
        else:
            shape = (*total.shape[:-2], self.factor.order, self.factor.order)
            add_triangle(total, moment.reshape(shape), weight)


@dataclass(frozen=True)
class SideSums:
    """The sums of A or of G of a layer.

    Attributes:
        quadratic: sums are of squares of gradients; else of inputs alone.
        vector: sums are of vectors; else of their squares.
    """

    layer: Layer
    side: str
    quadratic: bool
    vector: bool
    sums: Sequence[Sum]

    def moments(self, layer: Layer, x: Tensor, g: Tensor) -> list[Tensor]:
        """Return the moment of a call for each sum.

        Args:
            layer: the layer, or several layers as the groups of a layer.
        """
        blocks = [each.block for each in self.sums]
        if not self.vector:
            return layer.second_moments(self.side, x, g, blocks)
        moment = layer.first_moment(self.side, x, g)
        return [moment[..., block] for block in blocks]


@dataclass
class ExampleCounts:
    """How many examples and vectors went into the sums of a layer, in how many forward passes."""

    examples: int = 0
    vectors: int = 0
    passes: int = 0
    last_pass: int = -1

    def add(self, examples: int, vectors: int, forward_pass: int) -> None:
        """Count one call of the layer."""
        # A layer called again in the same pass sees the same examples at more positions.
        if forward_pass != self.last_pass:
            self.examples += examples
            self.passes += 1
        self.vectors += vectors
        self.last_pass = forward_pass


@dataclass
class LayerSums:
    """The sums of a layer, or of a group of a layer, and the counts of the sums.

    Attributes:
        subsample: the examples to take from a call.
        rounded: dtypes that products take as they are; other dtypes become that of the sums.
        complete: whether the backward pass has passed the layer.
    """

    layer: Layer
    vector: bool
    subsample: Subsample
    rounded: Collection[torch.dtype]
    sides: Sequence[SideSums]
    counts: ExampleCounts = field(default_factory=ExampleCounts)
    complete: bool = False


def bound(
    layer: Layer, planned: PlannedLayer, statistics: Mapping[str, Tensor], subsample: Subsample
) -> LayerSums:
    """Return the sums of a layer, or of a group of the planned layer, in the rank's statistics."""
    sides, vector = [], planned.preconditioner.vector
    for side in layer.shape.sides:
        factors, start, sums = planned.side(side), 0, []
        for factor in factors:
            block = slice(start, start + factor.order) if len(factors) > 1 else slice(None)
            start += factor.order
            if factor.name in statistics:
                total, count = statistics[factor.name], statistics[factor.counted]
                if layer.group is not None:
                    total = total.unflatten(0, (planned.shape.groups, -1))[layer.group]
                sums.append(Sum(factor, block, total, count))
        if sums:
            sides.append(SideSums(layer, side, side in layer.quadratic, vector, sums))
    products = layer.shape.kfac_approx == "expand" and layer.shape.maps_vectors and not vector
    exact = products and type(layer) in SIDE_BY_SIDE and layer.parameters[0].is_cuda
    rounded = ADDED_IN_FLOAT32 if exact and not planned.rescaled else ()
    return LayerSums(layer, vector, subsample, rounded, sides)


def _bound_layers(
    layers: Iterable[Layer], factors: Factors, estimator: Estimator
) -> dict[str, list[LayerSums]]:
    """Return the sums of layers with statistics on the rank, of each group of a layer."""
    planned = {layer.name: layer for layer in factors.plan.layers}
    shares = factors.plan.pooled
    of_layers = {
        layer.name: [
            bound(
                *(member, planned[layer.name], factors.statistics),
                estimator.subsampled(planned[layer.name], shares),
            )
            for member in layer.members
        ]
        for layer in layers
    }
    return {name: sums for name, sums in of_layers.items() if sums[0].sides}


class Recorder(Part):
    """Sums of `a a^T` and `g g^T`, or of `a` and `g`, over passes since the last `finish`.

    Sums hold the passes whose gradients `.grad` holds: at the begin of a backward pass, layers
    whose gradients have been set to None or 0 since the pass before forget the earlier passes.

    If factors are overlapped, a layer's sums are sent as soon as the backward pass has passed the
    layer.

    Attributes:
        recording: whether passes count.
        begin: where the chosen examples begin, as a share of their distance, from 0 to 1.
        paused: whether forward passes are not the batch's.
        vectors: of each layer's passes since the last `clear`; tables of entries have none.
        chosen: the vectors of statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        factors: Factors,
        estimator: Estimator,
        observers: Sequence[PreconditionerPart] = (),
    ) -> None:
        """Bind the layers with statistics on the rank to their sums.

        Args:
            observers: record every call that counts.
        """
        super().__init__(factors.site)
        self.recording, self.begin, self.paused = False, 0.0, False
        self._model, self._detached = model, False
        self.factors, self.estimator, self._of_loss = factors, estimator, estimator.of_loss
        self.statistics, self._observers = factors.statistics, observers
        layers = list(layers)
        self._layers = _bound_layers(layers, factors, estimator)
        self._comparison = Comparison(layers, self._of_loss and self.plan.rank == 0)
        self._recorded: set[str] = set()  # layers with sums that are not finished
        self._finished: set[str] = set()
        self._counted: dict[str, ExampleCounts] = {}  # of finished layers
        self._uneven: set[str] = set()  # layers that a warning was about
        self.vectors, self.chosen = Counter[str](), Counter[str]()
        self._derivatives_told = self.plan.rank > 0  # one rank tells, once
        self._passes = 0
        # Whether the next call of a layer begins a pass, as a backward pass has come in between.
        self._between = True
        self._running = self._interrupted = False  # backward passes that count
        self._followed = False  # whether the end of the backward pass notes gradients
        self._held: dict[str, Held] = {}  # gradients of recorded layers after a pass
        self._thrown_away_told = self.plan.rank > 0
        self._turn: Turn | None = None
        modules = (module for sums in self._sums() for module in sums.layer.modules)
        self._outputs = OwnOutputs(modules)
        self._hooks: list[Attached] = []
        finalize(self, _remove, self._hooks)
        self._stage: Callable[[], AbstractContextManager[None]]  # of a call
        self._stage = partial(self.site.trace.stage, STATISTICS)

    def listen(self) -> None:
        """Add hooks to the model and its layers: from here on, passes count."""
        if self.recording or self._detached:
            return
        self.recording = True
        own = ref(self)  # a model may outlive the recorder
        self._outputs.come_first()
        self._hooks += [
            Eagerly(),
            self._outputs,
            self._model.register_forward_pre_hook(Hook(self._on_pass, own)),
        ]
        for sums in self._sums():
            hook = Hook(self._on_forward, own, sums.layer)
            for module in sums.layer.modules:
                self._hooks += sums.layer.attach(module, hook)

    def rest(self) -> None:
        """Remove the hooks: until `listen`, the model is as without K-FAC."""
        if self.recording:
            self.recording = False
            _remove(self._hooks)

    def detach(self) -> None:
        """Remove the hooks for good: a step with new factors finds no pass."""
        self.rest()
        self.recording = self._detached = True

    def clear(self) -> None:
        """Forget the passes since the last `finish`."""
        for sums in self._sums():
            sums.counts, sums.complete = ExampleCounts(), False
        self._recorded.clear()
        self._finished.clear()
        self._counted.clear()
        self._held.clear()
        self.vectors.clear()
        self.chosen.clear()
        self._running = self._interrupted = False
        self.statistics.flat.zero_()

    forget = clear

    def finish(self) -> dict[str, bool]:
        """Turn the sums into the rank's factors, multiplied by the number of examples.

        Returns:
            By layer with statistics on the rank, whether a training pass had a call of the layer.

        Raises:
            RuntimeError: no layer has statistics.
        """
        if self._layers and not self._recorded and not self._finished:
            missing = "" if self._of_loss else "; call record(outputs) before the loss's backward()"
            raise RuntimeError(
                f"no covered layer took part in the training passes before this step (train() "
                f"mode, a batch that is not empty, backward, outside of transforms of torch.func), "
                f"so there are no statistics{missing}"
            )
        seen = {name: name in self._recorded | self._finished for name in self._layers}
        left = [name for name in self._layers if name not in self._finished]
        of_part = [name for name in left if self._layers[name][0].layer.of_part]
        self._finish_layers([name for name in left if name not in of_part])
        self._finish_layers(of_part)  # now that the number of the batch's examples is known
        self._finished.clear()
        self._held.clear()
        self._check_ends()
        self._check_counts()
        return seen

    def _examples(self) -> int:
        """Return the number of examples that layers of the whole batch have seen."""
        counted = self._counted.items()
        whole = [c.examples for name, c in counted if self._layers[name][0].layer.of_batch]
        return max(whole or [c.examples for _, c in counted])

    def _check_ends(self) -> None:
        """Warn of statistics of a backward pass that did not end."""
        if self._running or self._interrupted:
            log.warning(
                "a backward pass before this step was interrupted, and its layers count in part: "
                "statistics are wrong; after an interruption, call zero_grad() and discard(), and "
                "run the batch again"
            )
        self._running = self._interrupted = False

    def _check_counts(self) -> None:
        """Warn once of layers that saw other numbers of examples than others in as many passes."""
        finished, self._counted = self._counted, {}
        alike: dict[int, dict[int, list[str]]] = {}  # by passes, by examples
        for name, counts in finished.items():
            if self._layers[name][0].layer.of_batch:
                alike.setdefault(counts.passes, {}).setdefault(counts.examples, []).append(name)
        for sets in alike.values():
            if len(sets) > 1 and not self._uneven.issuperset(chain(*sets.values())):
                self._uneven.update(chain(*sets.values()))
                _warn_of_counts(sets)

    def _finish_layers(self, names: Collection[str]) -> None:
        """Turn the sums of layers into factors; without examples, the sums stay 0."""
        self._finished.update(names)
        self._recorded.difference_update(names)
        scaled = [each for name in names for each in self._scales(name)]
        if scaled:
            sums, scales, _ = zip(*scaled)
            torch._foreach_mul_([each.total for each in sums], scales)
            # Once for each factor: a factor may have several sums, of parts of a layer.
            counted = {each.factor.counted: (each.count, batch) for each, _, batch in scaled}
            counts, batches = map(list, zip(*counted.values()))
            torch._foreach_zero_(counts)
            torch._foreach_add_(counts, batches)

    def _scales(self, name: str) -> Iterator[tuple[Sum, float, float]]:
        """Yield the sums of a layer, the scales that make factors, and the number of examples."""
        normalization = self.estimator.normalization
        for sums in self._layers[name]:
            counts, complete = sums.counts, sums.complete
            sums.counts, sums.complete = ExampleCounts(), False
            if (vectors := counts.vectors) == 0:
                continue
            self._interrupted |= not complete
            batch, self._counted[name] = counts.examples, counts
            scales = sums.layer.scales(normalization, batch, vectors, sums.vector)
            for side in sums.sides:
                scale = scales[side.side] * batch
                if side.quadratic and not self._of_loss:
                    scale /= batch**2  # sums are of gradients of examples' own losses
                elif side.quadratic and sums.layer.of_part:  # the loss is a mean over the batch
                    scale *= (self._examples() / batch) ** (1 if sums.vector else 2)
                for factor_sum in side.sums:
                    yield factor_sum, scale, float(batch)

    @property
    def examples(self) -> int:
        """The number of examples of the rank's batch since the last `finish`."""
        of_batch = [sums for sums in self._sums() if sums.layer.of_batch]
        return max((sums.counts.examples for sums in of_batch), default=0)

    @property
    def of_gradients(self) -> list[str]:
        """Names of statistics made of gradients, or of squares of gradients."""
        names = (
            factor_sum.factor.name
            for sums in self._sums()
            for side in sums.sides
            if side.quadratic
            for factor_sum in side.sums
        )
        return list(dict.fromkeys(names))  # groups share a name

    def _sums(self) -> Iterator[LayerSums]:
        """Yield the sums of all layers and groups."""
        return chain.from_iterable(self._layers.values())

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside, forward passes are not the batch's."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def standing_for(self, turn: Turn) -> Iterator[None]:
        """Inside, a backward pass is one of several passes in the place of the loss's pass."""
        self._turn = turn
        try:
            yield
        finally:
            self._turn = None

    @staticmethod
    def _on_pass(own: ref[Recorder], *_: object) -> None:
        self = own()
        if self is not None:
            self._outputs.come_first()
        if self is not None and not self.paused and torch.is_grad_enabled():
            self._passes, self._between = self._passes + 1, False

    @staticmethod
    def _on_forward(own: ref[Recorder], layer: Layer, module: nn.Module, *called: Any) -> None:
        self = own()
        if self is not None:
            *inputs, output = called
            called = *inputs, self._outputs.take(module, output)
        trained = any(parameter.requires_grad for parameter in layer.parameters)
        if not (module.training and trained) or self is None or self.paused:
            return
        if (self._between or self._running) and not in_backward():
            if torch.is_grad_enabled():  # else a thread tests the model during a backward pass
                self._interrupted |= self._running
                self._running = self._followed = False
            if self._between:  # parts of the model are called, not the model
                self._passes, self._between = self._passes + 1, False
        call = layer.watch(*called)
        if call is not None:
            x, listen = call
            sums = self._layers[layer.name][layer.group or 0]
            version = -1 if x.is_inference() else x._version
            listen(partial(self._record, sums, [x.detach()], version, self._passes))

    def _on_end(self) -> None:
        self._running = False

    def _follow(self) -> None:
        """Forget passes whose gradients are gone, and note gradients when this pass has ended."""
        if self._followed:
            return
        self._followed = True
        self._comparison.begin()
        at_end_of_backward(partial(self._note_gradients, self._turn is None))
        gone = [name for name, held in self._held.items() if self._are_gone(name, held)]
        counts = self._of_loss or self._turn is not None
        for name in gone if counts else ():
            self._forget_layer(name)
        if gone and not self._thrown_away_told:
            self._thrown_away_told = True
            _warn_of_thrown_away(gone[0], counts)

    def _note_gradients(self, of_loss: bool) -> None:
        """Note the gradients that passes of losses have left in the model."""
        self._followed = False
        with torch.no_grad():
            if not self._derivatives_told:  # which explains another gradient
                self._comparison.end()
            for name in self._recorded if of_loss else ():
                if gradients := self._gradients(name):
                    versions = [(id(g), g._version) for g in gradients]
                    self._held[name] = Held(versions, torch._foreach_norm(gradients, 1))

    def _gradients(self, name: str) -> list[Tensor]:
        """Return the gradients of a layer, of which some or all may be None."""
        parameters = self._layers[name][0].layer.parameters
        return [p.grad for p in parameters if p.grad is not None]

    def _are_gone(self, name: str, held: Held) -> bool:
        """Return whether gradients that a pass has left are None or 0 now.

        The elements are read only if the program has changed the gradients.
        """
        gradients = self._gradients(name)
        if [(id(g), g._version) for g in gradients] == held.versions:
            return False
        return not gradients or (any(held.sizes) and not any(g.any() for g in gradients))

    def _forget_layer(self, name: str) -> None:
        """Forget the passes of a layer since the last `finish`."""
        for sums in self._layers[name]:
            sums.counts, sums.complete = ExampleCounts(), False
            for side in sums.sides:
                for factor_sum in side.sums:
                    factor_sum.total.zero_()
        self._recorded.discard(name)
        del self._held[name], self.vectors[name], self.chosen[name]
        for observer in self._observers:
            observer.forget_layer(name)

    @without_autocast
    def _record(
        self, sums: LayerSums, inputs: list[Tensor], version: int, forward_pass: int, g: Tensor
    ) -> None:
        """Take one call into the sums; `inputs` holds the call's input until then."""
        layer, turn = sums.layer, self._turn or Turn()
        if self.paused:
            return
        if not makes_gradients(layer.parameters):  # a gradient of inputs alone
            self._await_derivative(layer, g)
            return
        self._follow()
        if self._turn is None and not self._of_loss:
            inputs.clear()
            return
        if not inputs:
            raise _second_pass(layer)
        x = inputs.pop() if turn.last else inputs[0]
        if version >= 0 and x._version != version and not layer.bias_alone:
            raise changed_in_place(layer, "the input", "backward")
        self._between = True
        if not self._running:
            self._running = True
            at_end_of_backward(self._on_end)
        early = self.factors.sender.early
        if not self._recorded and not self._finished and early:
            self.factors.settle()
        if not self._recorded and self.estimator.fisher_type == "type-2" and layer.of_batch:
            _check_rows(layer, len(x) if x.dim() >= layer.dimensions else 1, turn.rows)
        self._recorded.add(layer.name)
        if x.dim() < layer.dimensions:  # one example without a batch dimension
            x, g = x[None], g[None]
        with self._stage(), torch.no_grad():
            if len(x):  # an empty batch counts 0 examples
                self._add(sums, x, g, forward_pass)
            sums.complete = turn.last
            complete = all(part.complete for part in self._layers[layer.name])
            if early and complete and not layer.of_part:
                self._finish_layers([layer.name])
                self.factors.ready(layer.name)

    def _await_derivative(self, layer: Layer, g: Tensor) -> None:
        """Warn once if the loss will turn out to depend on `g`, which leads to an input's gradient.

        With `create_graph=True`, `g` has a graph; a backward pass that makes gradients of
        parameters runs through it only if the loss has the gradient of the input as a part.
        """
        g = outside_of_transforms(g)
        if not self._derivatives_told and g.grad_fn is not None:
            listen(g, partial(self._on_derivative, layer))

    def _on_derivative(self, layer: Layer, _: Tensor) -> None:
        if not self._derivatives_told and makes_gradients(layer.parameters):
            self._derivatives_told = True
            _warn_of_derivatives(layer)

    def _add(self, sums: LayerSums, x: Tensor, g: Tensor, forward_pass: int) -> None:
        """Add one call's moments to the sums of a layer."""
        layer, turn, rounded = sums.layer, self._turn or Turn(), g.dtype
        dtype = g.dtype if g.dtype in sums.rounded else self.site.dtype
        if x.is_floating_point():  # under autocast, the layer multiplied rounded inputs
            x = x.to(g.dtype).to(dtype)
        g = g.to(dtype)
        self._comparison.add(layer, x, g, rounded)
        vectors, prepared = layer.positions(g), layer.prepared(x, g)
        of_layer = 0 if layer.group else vectors  # the first group stands for all
        if turn.first:
            sums.counts.add(len(x), vectors, forward_pass)
            self.vectors[layer.name] += of_layer * x.is_floating_point()
        chosen = sums.subsample.of(len(x), vectors, self.begin)
        chosen_x, chosen_g = prepared[chosen], g[chosen]
        weight = len(x) / max(1, len(chosen_x))
        self.chosen[layer.name] += of_layer * len(chosen_x) // len(x)
        of_squares = turn.weight * weight
        rows = turn.rows if layer.of_batch else len(x)
        if self._turn is not None:  # a mean over this pass alone, not over all micro-batches
            of_squares *= turn.rows * turn.terms if layer.of_part else len(x) * rows
        else:
            power = (0.5 if sums.vector else 1.0) * (2 if layer.of_part else 1)
            of_squares *= self.estimator.num_per_example_loss_terms**power
        sides = [side for side in sums.sides if side.quadratic or turn.first]
        self._take(sides, chosen_x, chosen_g, weight, of_squares)
        for observer in self._observers:
            observer.record(layer, chosen_x, chosen_g, of_squares)

    def _take(self, sides: Iterable[SideSums], x: Tensor, g: Tensor, *weights: float) -> None:
        """Add a call's moments of inputs and of squares, times their `weights`, to the sums."""
        for side in sides:
            for factor_sum, moment in zip(side.sums, side.moments(side.layer, x, g)):
                factor_sum.add(moment, weights[side.quadratic])


def changed_in_place(layer: Layer, what: str, before: str) -> RuntimeError:
    """Return the error of a tensor that has changed too early."""
    return RuntimeError(
        f"layer {layer.name!r}: {what} was changed in place after the call, and before {before}; "
        f"give the layer a clone of its own, or change a clone"
    )


def _second_pass(layer: Layer) -> RuntimeError:
    """Return the error of a forward pass whose statistics are taken."""
    return RuntimeError(
        f"layer {layer.name!r}: a second backward pass through one forward pass has no statistics "
        f"of its own; add the losses and call backward once, give the outputs of all heads to one "
        f"record(), and put passes for derivatives of gradients, forward and backward, in "
        f"no_recording()"
    )


def _remove(hooks: list[Attached]) -> None:
    """Take all hooks away from the model."""
    while hooks:
        hooks.pop().remove()


def _warn_of_derivatives(layer: Layer) -> None:
    """Warn of a loss whose gradient has a part that the factors lack."""
    log.warning(
        "layer %r: the loss holds derivatives of the network in its inputs (create_graph=True), as "
        "of a PINN or with a gradient penalty, and the factors lack their part: the curvature is "
        "that of the outputs alone. For a PINN try less damping than the default: "
        "damping=mpikfac.Damping(relative=1.0)",
        layer.name,
    )


def _warn_of_thrown_away(name: str, forgotten: bool) -> None:
    """Warn of a pass whose gradients no step takes."""
    if forgotten:
        log.warning(
            "layer %r: the gradients of a backward pass were set to None or 0 before the step, so "
            "factors do not include the pass either; if it belongs to the batch, leave gradients "
            "in .grad until step()",
            name,
        )
    else:
        log.warning(
            "layer %r: the gradients of a backward pass were set to None or 0 after record() of "
            "the next pass, so factors include both; call zero_grad() before record()",
            name,
        )


def _warn_of_counts(sets: Mapping[int, Sequence[str]]) -> None:
    """Warn of layers that saw different numbers of examples of a batch; `sets` by the number."""
    seen = [
        f"{number} examples by {', '.join(map(repr, names[:3]))}{' ...' * (len(names) > 3)}"
        for number, names in sorted(sets.items())
    ]
    log.warning(
        "layers saw different numbers of examples of one batch: %s. The first dimension of a "
        "layer's input has to be the batch: where it is not, the layer's curvature is wrong and "
        "depends on the number of ranks; take batch_first=True, or name such layers in "
        "coverage=mpikfac.Coverage(skip=[...]); name layers of experts, or of nodes of graphs, in "
        "part_of_batch=[...] (the loss is a mean over the batch), and layers of boxes in "
        "own_examples=[...] (the loss is a mean over the boxes)",
        "; ".join(seen),
    )


def _check_rows(layer: Layer, examples: int, rows: int) -> None:
    """Return if all labels at once are those of `examples`.

    Raises:
        ValueError: outputs have rows for positions: gradients of positions would mix.
    """
    if rows != examples:
        raise ValueError(
            f"fisher_type='type-2' needs a row of outputs for each example: record() has {rows} "
            f"rows, and layer {layer.name!r} saw {examples} examples; take "
            f"estimator=mpikfac.Estimator(fisher_type='mc')"
        )
