"""Compare each weight's gradient with the gradient from the calls used to compute its factors.

If a loss also uses a weight outside of the layer's calls, as a weight penalty does, no factor
contains the curvature of that part of the loss. A few random projections of `sum g a^T`, in
the first passes of a run, detect such uses at the cost of multiplying by a few vectors.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from mpikfac.layers import SIDE_BY_SIDE, EmbeddingLayer, Layer
from mpikfac.numerics import is_sharded, without_autocast

COMPARED = SIDE_BY_SIDE | {EmbeddingLayer}  # derived classes may compute something else
PASSES = 3  # the number of passes to compare
PROBES = 4  # the number of random projections of each gradient
LARGE = 0.2  # the allowed difference, relative to the gradient
ROUNDING = 16.0  # the allowed rounding error, in units of the last place

Key = tuple[str, int | None]
"""A layer's name and group."""

log = logging.getLogger("mpikfac")


class Comparison:
    """The projections of gradients in the current pass."""

    def __init__(self, layers: Iterable[Layer], on: bool) -> None:
        """Select the layers to compare.

        Args:
            layers: the recorded layers; only those whose types are in `COMPARED` are compared.
            on: whether to compare weight gradients with recorded calls in the first passes.
        """
        compared = (x for x in layers if type(x) in COMPARED and not x.bias_alone)
        # The gradient of a sharded weight is already the mean over ranks.
        self._layers = {_key(x): x for x in compared if not is_sharded(x.parameters[0])}
        self._left = PASSES if on else 0
        self._probes: dict[Key, tuple[Tensor, Tensor]] = {}
        # Projections of the calls' products, and bounds on their rounding errors.
        self._sums: dict[Key, tuple[Tensor, Tensor]] = {}

    def begin(self) -> None:
        """Begin a pass, in which layers that have no gradient yet are compared."""
        self._sums.clear()
        if not self._left:
            return
        weights = {
            key: layer.parameters[0] for key, layer in self._layers.items() if not _is_split(layer)
        }
        fresh = {key: w for key, w in weights.items() if w.grad is None and w.requires_grad}
        if fresh and _averaged_by_ddp(fresh.values()):
            self.stop()
            return
        for key, weight in fresh.items():
            zeros = torch.zeros(PROBES, dtype=torch.float64, device=weight.device)
            self._sums[key] = zeros, zeros.clone()

    def stop(self) -> None:
        """Stop comparing passes."""
        self._left = 0
        self._sums.clear()
        self._probes.clear()

    @without_autocast
    @torch.no_grad()
    def add(self, layer: Layer, x: Tensor, g: Tensor) -> None:
        """Add a call in which the layer multiplied in the dtype of `g`."""
        if _key(layer) not in self._sums or not g.numel():
            return
        if x.dim() < layer.dimensions:  # one example without a batch dimension
            x, g = x[None], g[None]
        x = x.to(g.dtype) if x.is_floating_point() else x
        of_inputs, of_outputs = layer.projections(x, g, *self._probes_of(layer))
        terms = (of_inputs * of_outputs).double()
        total, bound = self._sums[_key(layer)]
        total += terms.sum(0)
        bound += ROUNDING * torch.finfo(g.dtype).eps * terms.abs().sum(0)

    @torch.no_grad()
    def end(self) -> None:
        """End a pass; warn once about gradients that the calls do not explain."""
        if not self._sums:
            return
        self._left -= 1
        names, differences = [], []
        for key, (total, bound) in self._sums.items():
            layer = self._layers[key]
            gradient = layer.parameters[0].grad
            if key in self._probes and gradient is not None:
                of_inputs, of_outputs = self._probes[key]
                matrices = _as_matrices(layer, gradient.detach()).double()
                found = ((matrices @ of_inputs) * of_outputs).sum((0, 1))
                allowed = LARGE * found.norm() + bound.norm()
                names.append(layer.name)
                differences.append((found - total).norm() - allowed)
        self._sums.clear()
        large = torch.stack(differences).tolist() if names else []
        other = [name for name, difference in zip(names, large) if difference > 0]
        if other or not self._left:
            self.stop()
        if other:
            further = len({*other}) - 1
            log.warning(
                "layer %r%s: the weight's gradient differs from the one computed from the module's "
                "calls, as with a weight penalty, a gradient penalty, a hook on the weight, or "
                "F.linear(x, layer.weight) outside of the module; factors include only the calls: "
                "use weight_decay instead of a penalty, call the module, or train the layer "
                "first-order with coverage=mpikfac.Coverage(skip=[...])",
                other[0],
                f" and {further} others" * (further > 0),
            )

    def _probes_of(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return random vectors for inputs and outputs, the same on all ranks.

        Their shapes are `[groups, inputs, probes]` and `[groups, outputs, probes]`.
        """
        key = _key(layer)
        if key not in self._probes:
            weight, generator = layer.parameters[0], torch.Generator().manual_seed(0)
            groups, outputs, inputs = _as_matrices(layer, weight).shape
            of_inputs, of_outputs = (
                torch.randn(
                    *(groups, size, PROBES),
                    generator=generator,
                    dtype=torch.float64,
                    device="cpu",
                ).to(weight.device)
                for size in (inputs, outputs)
            )
            self._probes[key] = of_inputs, of_outputs
        return self._probes[key]


def _key(layer: Layer) -> Key:
    return layer.name, layer.group


def _as_matrices(layer: Layer, weight: Tensor) -> Tensor:
    """Return a weight, or its gradient, as `[groups, outputs, inputs]`."""
    outputs, inputs = layer.shape.outputs, layer.shape.inputs - layer.bias
    matrices = layer.arranged(weight).reshape(-1, outputs, inputs)
    return matrices if layer.group is None else matrices[layer.group][None]


def _is_split(layer: Layer) -> bool:
    """Return whether ranks compute parts of the layer, so that gradients are partial sums."""
    return hasattr(layer.module.forward, "watch")


def _averaged_by_ddp(weights: Iterable[Tensor]) -> bool:
    """Return whether a backward pass averages a gradient over the ranks of torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    if distributed.get_world_size() == 1:
        return False
    own = {id(weight) for weight in weights}
    wrapped = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    return any(id(parameter) in own for model in wrapped for parameter in model.parameters())
