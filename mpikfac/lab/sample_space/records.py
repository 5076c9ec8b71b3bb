"""Record the rows of the residuals' Jacobian as products of the vectors that layers receive.

A residual's row in a linear layer is the sum of `g a^T` over the streams of its point, which are
the value and derivatives of a jet, at all positions and in all calls. Because points are
independent, a single backward pass of the summed residuals yields the vectors of all points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.lab.sample_space.jet import Jet
from mpikfac.lab.sample_space.parameters import F64, Parameters
from mpikfac.lab.sample_space.terms import Term
from mpikfac.numerics import in_transform, listen

TOLERANCE = {torch.float32: 1e-3, F64: 1e-6}
"""The maximum relative difference between a recorded row and the row that autograd computes."""
ROUNDING = 64
"""The number of epsilons by which gradients may differ from exact multiples of each other."""
NO_COLUMN = -1
"""The value of `Tape.column` during backward passes that are not recorded."""


class Block:
    """Rows of the Jacobian with respect to one parameter matrix, stored as vectors.

    Attributes:
        a: the inputs of the matrix, `[rows, streams, inputs]`, in float64.
        g: the gradients of the residuals with respect to the matrix's outputs,
            `[rows, streams, outputs]`.
    """

    def __init__(self, a: Tensor, g: Tensor) -> None:
        self.a, self.g = a, g

    @property
    def streams(self) -> int:
        """The number of products that sum to a row."""
        return self.a.shape[1]

    @cached_property
    def matrix(self) -> Tensor:
        """The rows themselves, `[rows, outputs * inputs]`."""
        return (self.g.mT @ self.a).flatten(1)

    @cached_property
    def of_streams(self) -> list[tuple[Tensor, Tensor]]:
        """For each stream, the vectors `[rows, inputs]` and `[rows, outputs]`."""
        streams = [x.transpose(0, 1).contiguous().unbind() for x in (self.a, self.g)]
        return [*zip(*streams)]

    def part(self, rows: slice) -> Block:
        """Return the block of the rows in a slice."""
        return Block(self.a[rows], self.g[rows])

    def combined(self, coefficients: Tensor) -> Tensor:
        """Return a linear combination of the rows, `[outputs, inputs]`."""
        g = (self.g * coefficients[:, None, None]).flatten(0, 1)
        return g.T @ self.a.flatten(0, 1)


Rows = Sequence[Block]
"""Rows of the Jacobian: a block for each matrix of `Parameters`."""


@dataclass
class TapedCall:
    """A call of a layer, with its inputs and the gradients with respect to its outputs.

    Attributes:
        a: the inputs, `[points, streams, inputs]`.
        second_derivatives: how many of the last streams are second derivatives of a jet.
        gradients: the gradients `[points, streams, outputs]`, by column of the residuals.
    """

    a: Tensor
    second_derivatives: int
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def streams(self, column: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and a column's gradients, with as few streams as possible."""
        return _collapsed(self.a, self.gradients[column], self.second_derivatives)


class Tape:
    """Record the calls of layers in a residual function, and the gradients in backward passes.

    Attributes:
        calls: the calls of each layer.
        column: the column of residuals whose backward pass is running, or `NO_COLUMN`; None while
            the residual function is running.
    """

    def __init__(self, parameters: Parameters, term: Term) -> None:
        self.calls: dict[str, list[TapedCall]] = {name: [] for name in parameters.layers}
        self.column: int | None = None
        self._layers, self._term = parameters.layers, term

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context in which calls are recorded."""
        hooks = [  # called before the program's hooks, which may change the output
            layer.register_forward_hook(
                partial(self._on_forward, name), with_kwargs=True, prepend=True
            )
            for name, layer in self._layers.items()
        ]
        hooks += [
            layer.register_forward_pre_hook(partial(self._on_call, name), with_kwargs=True)
            for name, layer in self._layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.column = NO_COLUMN

    def _on_call(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        for x in (*inputs, *named.values()):
            if x.dtype != module.weight.dtype:
                raise ValueError(
                    f"term {self._term.name!r} calls layer {name!r} of {module.weight.dtype} with "
                    f"{x.dtype}; convert the points, for example with points.double()"
                )

    def _on_forward(
        self,
        name: str,
        module: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        out: Any,
    ) -> None:
        if in_transform():
            raise ValueError(
                f"term {self._term.name!r} calls layer {name!r} inside a torch.func transform, so "
                f"the layer cannot see the derivatives; use those of model(mpikfac.lab.jet(x))"
            )
        (x,) = (*inputs, *named.values())
        streams, out = (x.streams, out.streams) if isinstance(x, Jet) else (x[:, None], out)
        one = streams.new_zeros(streams.shape[1:-1])
        one[0] = 1.0  # the bias is added to the value only
        a = streams.detach().flatten(1, -2)
        if len(a) != self._term.count:
            raise ValueError(
                f"term {self._term.name!r} calls layer {name!r} with {len(a)} rows for "
                f"{self._term.count} points; pass one row per point, and call the model several "
                f"times for several inputs of a point"
            )
        if module.bias is not None:
            a = torch.cat([a, one.view(-1, 1).expand(len(a), -1, 1)], 2)
        call = TapedCall(a, x.directions if isinstance(x, Jet) and x.ndim == 2 else 0)
        self.calls[name].append(call)
        listen(out, partial(self._on_gradient, name, call))

    def _on_gradient(self, name: str, call: TapedCall, g: Tensor) -> None:
        if self.column is None:
            raise ValueError(
                f"term {self._term.name!r} runs a backward pass through layer {name!r}, so part "
                f"of the weight's gradient would be missed; use the derivatives of "
                f"model(mpikfac.lab.jet(x))"
            )
        call.gradients[self.column] = g.detach().reshape(*call.a.shape[:2], -1)

    def blocks(self, name: str, columns: int) -> Iterator[Block]:
        """Yield a layer's block for each column of residuals, with the streams of all calls."""
        calls = [call for call in self.calls[name] if call.gradients]
        layer = self._layers[name]
        count, inputs = self._term.count, layer.in_features + (layer.bias is not None)
        empty = (
            layer.weight.new_empty(count, 0, inputs),
            layer.weight.new_empty(count, 0, layer.out_features),
        )
        for column in range(columns):
            pairs = [call.streams(column) for call in calls if column in call.gradients]
            a, g = (torch.cat(side, 1) for side in zip(empty, *pairs))
            yield Block(a.to(F64), g.to(F64))


def _collapsed(a: Tensor, g: Tensor, second_derivatives: int) -> tuple[Tensor, Tensor]:
    """Merge the last `second_derivatives` streams into one, if possible.

    `c g a^T + d g b^T` equals `g (c a + d b)^T`. At a point, the gradients with respect to second
    derivatives along several directions are multiples of each other, because each layer and
    function treats all directions in the same way [Dangel et al. 2025]; the exception is a residual
    that uses several outputs of the network with different directions.
    """
    if second_derivatives < 2:
        return a, g
    first = g.shape[1] - second_derivatives
    second = g[:, first:]
    largest = second.square().sum(2).argmax(1)
    common = second[torch.arange(len(g), device=g.device), largest, :, None]  # [points, outputs, 1]
    factors = second @ common / common.square().sum(1, True).clamp_min(torch.finfo(g.dtype).tiny)
    rest = second - factors @ common.mT
    if rest.norm() > ROUNDING * torch.finfo(g.dtype).eps * second.norm():
        return a, g
    return (
        torch.cat([a[:, :first], factors.mT @ a[:, first:]], 1),
        torch.cat([g[:, :first], common.mT], 1),
    )


def record(
    model: nn.Module, parameters: Parameters, term: Term, scale: float, check: bool
) -> tuple[Rows, Tensor]:
    """Return the rows of the Jacobian at the rank's points, and the residuals, `[rows]`.

    Both are ordered by column of the residuals, then by point, and multiplied by `scale`.

    Collective over: none.

    Args:
        check: whether to compare rows with those that autograd computes.

    Raises:
        ValueError: the rows of the term's residuals cannot be recorded, or differ from the rows
            that autograd computes.
    """
    if not term.count:
        return _empty(parameters)
    tape = Tape(parameters, term)
    with torch.enable_grad():
        with tape.recording():
            found = term.values(model) * scale
        if not found.requires_grad:
            raise ValueError(
                f"the residuals of term {term.name!r} do not depend on a trained parameter; "
                f"remove the term, or remove no_grad() and detach() from it"
            )
        if len(found) == found.shape[1] > 1:
            term.check_alike(model, found[0], parameters.tensors)
        if wrong := int((~found.isfinite()).any(1).sum()):
            raise ValueError(
                f"residuals of term {term.name!r} are not finite at {wrong} points; check the "
                f"function there, and the model's weights"
            )
        columns = found.T.contiguous()  # [k, points]
        also = _also(columns.flatten(), parameters.also)
        tensors = parameters.tensors
        for number, column in enumerate(columns):
            tape.column = number
            torch.autograd.grad(column.sum(), tensors, retain_graph=True, allow_unused=True)
        tape.column = NO_COLUMN
        rows = [_joined([*tape.blocks(name, len(columns))]) for name in parameters.layers] + also
        if check:
            _check(columns.flatten(), rows, parameters, term)
    return rows, columns.detach().flatten().to(F64)


def _empty(parameters: Parameters) -> tuple[Rows, Tensor]:
    """Return empty rows and residuals."""
    none = torch.empty(0, dtype=F64, device=parameters.device)
    shapes = parameters.shapes
    return [Block(none.view(0, 0, i), none.view(0, 0, o)) for o, i in shapes], none


def _joined(blocks: Sequence[Block]) -> Block:
    """Concatenate the rows of blocks; blocks with fewer streams are padded with zeros."""
    streams = max(block.streams for block in blocks)

    def padded(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, streams - x.shape[1]))

    return Block(
        torch.cat([padded(block.a) for block in blocks]),
        torch.cat([padded(block.g) for block in blocks]),
    )


def _also(residuals: Tensor, also: Sequence[Tensor]) -> list[Block]:
    """Return the block of the additional parameters, computed as columns of the Jacobian.

    Each element of a parameter gives an element of `J^T v`, whose derivative with respect to v is a
    column of J.
    """
    if not also:
        return []
    v = torch.zeros_like(residuals, requires_grad=True)
    products = torch.autograd.grad(residuals, also, v, create_graph=True, allow_unused=True)
    columns: list[Tensor] = []
    for parameter, product in zip(also, products):
        if product is None:
            columns += [torch.zeros_like(v)] * parameter.numel()
            continue
        for element in product.flatten():
            columns += torch.autograd.grad(element, v, retain_graph=True)
    a = torch.stack(columns, 1)[:, None].detach().to(F64)
    return [Block(a, torch.ones_like(a[..., :1]))]


def _check(residuals: Tensor, rows: Rows, parameters: Parameters, term: Term) -> None:
    """Check each column's first and last row, and a combination of all rows, against autograd.

    Raises:
        ValueError: a row or the combination differs from autograd's result; the message names the
            parameter.
    """
    firsts = range(0, len(residuals), term.count)
    for row in sorted({row for first in firsts for row in (first, first + term.count - 1)}):
        part = slice(row, row + 1)
        own = [block.part(part) for block in rows]
        _compare(residuals[part], own, torch.ones_like(residuals[part]), parameters, term)
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(len(residuals), generator=generator, device="cpu").to(residuals)
    _compare(residuals, rows, drawn, parameters, term)


def _compare(
    residuals: Tensor, rows: Rows, coefficients: Tensor, parameters: Parameters, term: Term
) -> None:
    """Check a linear combination of rows against autograd.

    Raises:
        ValueError: the combination differs from autograd's result; the message names the parameter.
    """
    tolerance, eps = TOLERANCE[parameters.dtype], torch.finfo(parameters.dtype).eps
    found = torch.cat([block.combined(coefficients.to(F64)).flatten() for block in rows])
    gradients = torch.autograd.grad(
        residuals, parameters.tensors, coefficients, retain_graph=True, allow_unused=True
    )
    exact = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters.tensors, gradients)
    ]
    whole = float(torch.cat([gradient.flatten() for gradient in exact]).norm())
    for (name, own), of_autograd in zip(parameters.views(found).items(), exact):
        error = float((own - of_autograd).norm())
        if not error <= tolerance * float(of_autograd.norm()) + 1e3 * eps * whole:
            raise ValueError(
                f"in term {term.name!r}, a residual's gradient with respect to {name!r} differs "
                f"from autograd's by {error:.1e} of {float(of_autograd.norm()):.1e}: use the "
                f"parameter only by calling its layer, take derivatives with respect to inputs "
                f"only with mpikfac.lab.jet, and do not use values of other points"
            )
