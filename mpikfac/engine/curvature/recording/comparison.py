"""Compare gradients of linear layers with the calls from which factors are computed.

If a loss also uses a weight outside of the layer's calls, as a weight penalty does, no factor
contains the curvature of that part of the gradient. A few random projections of `sum g a^T`, in
the first passes of a run, detect such gradients at the cost of a few vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, distributed

from mpikfac.layers import Layer

PASSES = 3  # how many are compared
PROBES = 4
LARGE = 0.2  # relative to the gradient
ROUNDING = 16.0  # in units of the last place

log = logging.getLogger("mpikfac")


class Comparison:
    """The projections of gradients in the current pass."""

    def __init__(self, layers: Iterable[Layer], on: bool) -> None:
        """Compare those layers that are plain linear layers, if `on`."""
        self._layers = {x.name: x for x in layers if type(x) is Layer and not x.bias_alone}
        self._left = PASSES if on else 0
        self._probes: dict[str, tuple[Tensor, Tensor]] = {}
        # Projections of the calls' products, and bounds of their rounding errors.
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def begin(self) -> None:
        """Begin a pass, in which layers that have no gradient yet are compared."""
        self._sums.clear()
        averaged = distributed.is_available() and distributed.is_initialized()
        if averaged or not self._left:  # another library's averages are not the rank's own
            return
        for name, layer in self._layers.items():
            weight = layer.parameters[0]
            if weight.grad is None and weight.requires_grad:
                zeros = torch.zeros(PROBES, dtype=torch.float64, device=weight.device)
                self._sums[name] = zeros, zeros.clone()

    @torch.no_grad()
    def add(self, layer: Layer, x: Tensor, g: Tensor) -> None:
        """Add a call of a layer that multiplied in the dtype of `g`."""
        if layer.name not in self._sums:
            return
        of_outputs, of_inputs = self._probes_of(layer)
        rows_x, rows_g = (t.to(g.dtype).reshape(-1, t.shape[-1]).double() for t in (x, g))
        terms = (rows_g @ of_outputs) * (rows_x @ of_inputs)
        total, bound = self._sums[layer.name]
        total += terms.sum(0)
        bound += ROUNDING * torch.finfo(g.dtype).eps * terms.abs().sum(0)

    @torch.no_grad()
    def end(self) -> None:
        """End a pass; warn once about gradients that the calls do not explain."""
        if not self._sums:
            return
        self._left -= 1
        names, differences = [], []
        for name, (total, bound) in self._sums.items():
            gradient = self._layers[name].parameters[0].grad
            if name in self._probes and gradient is not None:
                of_outputs, of_inputs = self._probes[name]
                found = ((gradient.detach().double() @ of_inputs) * of_outputs).sum(0)
                allowed = LARGE * found.norm() + bound.norm()
                names.append(name)
                differences.append((found - total).norm() - allowed)
        self._sums.clear()
        large = torch.stack(differences).tolist() if names else []
        if other := [name for name, difference in zip(names, large) if difference > 0]:
            self._left = 0
            log.warning(
                "layer %r%s: the gradient of the weight is not that of the module's calls, as with "
                "a weight penalty, a gradient penalty, a hook of the weight, or F.linear(x, "
                "layer.weight) outside of the module; factors include only the calls: use "
                "weight_decay instead of a penalty, call the module, or leave the layer to "
                "first-order steps by coverage=mpikfac.Coverage(skip=[...])",
                other[0],
                f" and {len(other) - 1} others" * (len(other) > 1),
            )

    def _probes_of(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return random signs `[outputs, probes]` and `[inputs, probes]`, the same on all ranks."""
        if layer.name not in self._probes:
            weight, generator = layer.parameters[0], torch.Generator().manual_seed(0)
            sides = (
                torch.randint(0, 2, (size, PROBES), generator=generator, device="cpu")
                for size in weight.shape
            )
            outputs, inputs = ((2 * side - 1).to(weight.device, torch.float64) for side in sides)
            self._probes[layer.name] = outputs, inputs
        return self._probes[layer.name]
