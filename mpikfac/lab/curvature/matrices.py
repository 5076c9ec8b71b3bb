"""Convert tensors by parameter name to matrices by layer, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from mpikfac.layers import Layer


class ParameterMatrices:
    """Convert per-parameter tensors to per-layer matrices, for one or many examples.

    Args:
        skip: names of parameters, or of modules, that vectors may contain although no layer covers
            them; they are left out of all results.

    Raises:
        ValueError: a trained parameter is neither covered by a layer nor listed in `skip`.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], skip: Collection[str]) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {layer.name: [names[id(p)] for p in layer.parameters] for layer in layers}
        self._layers = {layer.name: layer for layer in layers}
        self.covered = {name for of_layer in self._names.values() for name in of_layer}
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        left = sorted(trained - self.covered)
        self.skipped = {n for n in left if any(n == s or n.startswith(f"{s}.") for s in skip)}
        if missing := [name for name in left if name not in self.skipped]:
            raise ValueError(
                f"no factors cover {', '.join(missing)}; pass skip={missing!r} to leave them out "
                f"of all results"
            )

    def matrices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a matrix `[examples, groups, outputs, inputs]` in float64 for each layer.

        Args:
            tensors: a tensor for each covered parameter, in the parameter's shape, optionally with
                a leading dimension of examples.

        Raises:
            ValueError: a parameter is missing or unknown, or a shape does not match.
        """
        given = {name: t for name, t in tensors.items() if name not in self.skipped}
        if wrong := sorted(self.covered.symmetric_difference(given)):
            what = "is missing" if wrong[0] in self.covered else "is not a covered parameter"
            raise ValueError(
                f"a vector needs a tensor for each covered parameter: {wrong[0]} {what}"
            )
        return {name: self._matrix(layer, given) for name, layer in self._layers.items()}

    def has_examples(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the tensors have a leading dimension of examples."""
        layer = next(iter(self._layers.values()))
        (name, *_), (parameter, *_) = self._names[layer.name], layer.parameters
        return tensors[name].dim() > parameter.dim()

    def _matrix(self, layer: Layer, tensors: Mapping[str, Tensor]) -> Tensor:
        given = [tensors[name].detach().double() for name in self._names[layer.name]]
        for name, tensor, parameter in zip(self._names[layer.name], given, layer.parameters):
            if tensor.shape[-parameter.dim() :] != parameter.shape:
                raise ValueError(
                    f"the vector's {name} is {[*tensor.shape]}, but the parameter is "
                    f"{[*parameter.shape]}; pass a tensor of this shape, or with a leading "
                    f"dimension of examples"
                )
        rows = [t[None] if t.dim() == p.dim() else t for t, p in zip(given, layer.parameters)]

        def join(*parts: Tensor) -> Tensor:
            matrix = parts[0].new_empty(layer.shape.gradient)
            for place, part in zip(layer.parts(matrix), parts):
                place.copy_(layer.arranged(part))
            return matrix

        return torch.vmap(join)(*rows).view(len(rows[0]), *grouped(layer))

    def tensors(
        self, matrices: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Convert matrices back to the tensors of covered parameters; the inverse of `matrices`.

        Args:
            like: tensors whose dtype and leading dimension the results take; None to keep those of
                the matrices.
        """
        tensors: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            for parameter, rows in zip(self._names[name], self._split(layer, matrices[name])):
                model = None if like is None else like[parameter]
                tensors[parameter] = rows if model is None else rows.to(model).view(model.shape)
        return tensors

    def _split(self, layer: Layer, matrices: Tensor) -> Sequence[Tensor]:
        def split(matrix: Tensor) -> tuple[Tensor, ...]:
            parts = [matrix.new_empty(parameter.shape) for parameter in layer.parameters]
            for part, place in zip(parts, layer.parts(matrix)):
                layer.arranged(part).copy_(place)
            return tuple(parts)

        rows: Sequence[Tensor] = torch.vmap(split)(
            matrices.contiguous().view(len(matrices), *layer.shape.gradient)
        )
        return rows


def grouped(layer: Layer) -> tuple[int, int, int]:
    """Return the shape `[groups, outputs, inputs]` of a layer's matrices."""
    return layer.shape.groups, layer.shape.outputs, layer.shape.inputs
