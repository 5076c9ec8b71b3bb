"""Arrange trained parameters as matrices, one per layer, in a flat vector."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

log = logging.getLogger("mpikfac")

F64 = torch.float64
OF_ALSO = "also/"


class Parameters:
    """The trained parameters of a model's linear layers, and additional unknowns.

    A layer's matrix is `[outputs, inputs + 1]`, with the bias as its last column; the parameters in
    `also` form a matrix with a single row, `[1, elements]`. Vectors contain all matrices in
    float64, in row-major order.

    Args:
        also: additional parameters, which may belong to the model.

    Attributes:
        layers: the trained linear layers, by name.
        also: the additional parameters.
        outside: the additional parameters outside the model, by name: "also/0", "also/1" ...
        tensors: all parameters: those of layers in model order, then those in `also`.
        shapes: the shape of each matrix.
        size: the number of elements of a vector.

    Raises:
        ValueError: a trained parameter is neither in a linear layer nor in `also`; `also` contains
            anything other than distinct trainable tensors outside the layers; a layer has a frozen
            and a trained parameter, or shares one with another layer; there are no parameters; or
            not all parameters have the same device and the same dtype, float32 or float64.
    """

    def __init__(self, model: nn.Module, also: Iterable[Tensor] = ()) -> None:
        if torch.is_tensor(also):
            raise ValueError("also must be a list of tensors, not a tensor; pass also=[...]")
        self.also = list(also)
        self.layers = _covered(model, self.also)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.outside = {f"{OF_ALSO}{i}": p for i, p in enumerate(self.also) if id(p) not in names}
        names |= {id(parameter): name for name, parameter in self.outside.items()}
        self.tensors = [*self._in_layers(), *self.also]
        self._names = [names[id(parameter)] for parameter in self.tensors]
        self.shapes = [
            (layer.out_features, layer.in_features + (layer.bias is not None))
            for layer in self.layers.values()
        ]
        if self.also:
            self.shapes.append((1, sum(parameter.numel() for parameter in self.also)))
        self.size = sum(map(math.prod, self.shapes))
        self.dtype, self.device = _common(dict(zip(self._names, self.tensors)))

    def _in_layers(self) -> Iterator[Tensor]:
        for layer in self.layers.values():
            yield from (p for p in (layer.weight, layer.bias) if p is not None)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector as matrices."""
        parts = vector.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector in the parameters' shapes, by parameter name.

        Names are those of the model's parameters and of `outside`.
        """
        return dict(zip(self._names, self._views(self.split(vector))))

    def _views(self, matrices: Sequence[Tensor]) -> Iterator[Tensor]:
        for layer, matrix in zip(self.layers.values(), matrices):
            yield matrix[:, : layer.in_features]
            if layer.bias is not None:
                yield matrix[:, -1]
        start = 0
        for parameter in self.also:
            part = matrices[-1][0, start : start + parameter.numel()]
            yield part.view(parameter.shape)
            start += parameter.numel()

    def read(self) -> Tensor:
        """Return the parameters as a vector."""
        vector = torch.empty(self.size, dtype=F64, device=self.device)
        for view, parameter in zip(self._views(self.split(vector)), self.tensors):
            view.copy_(parameter.detach())
        return vector

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the parameters to the elements of a vector."""
        for view, parameter in zip(self._views(self.split(vector)), self.tensors):
            parameter.copy_(view)


def _covered(model: nn.Module, also: Sequence[Tensor]) -> dict[str, nn.Linear]:
    """Return the trained linear layers by name, after checking that nothing else is trained."""
    layers: dict[str, nn.Linear] = {}
    known = {id(parameter): "also" for parameter in also}
    if len(known) < len(also):
        raise ValueError("also contains a parameter twice; pass each parameter once")
    for parameter in also:
        if not torch.is_tensor(parameter) or not parameter.is_leaf or not parameter.requires_grad:
            raise ValueError(
                "also must contain leaf tensors that require gradients, such as "
                "torch.nn.Parameter(torch.ones(2))"
            )
    for name, module in model.named_modules():
        own = [p for p in (module.weight, module.bias) if p is not None] if _linear(module) else []
        trained = [parameter for parameter in own if parameter.requires_grad]
        if not trained:
            continue
        if len(trained) < len(own):
            raise ValueError(
                f"layer {name!r} has a frozen and a trained parameter; freeze both, or neither"
            )
        for parameter in own:
            other = known.setdefault(id(parameter), name)
            if other == "also":
                raise ValueError(f"also must not contain parameters of layer {name!r}; remove them")
            if other != name:
                raise ValueError(
                    f"layers {other!r} and {name!r} share a parameter; call one layer twice instead"
                )
        layers[name] = module
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            owner = model.get_submodule(name.rpartition(".")[0])
            raise ValueError(
                f"parameter {name!r} of a {type(owner).__name__} cannot be trained, because only "
                f"those of torch.nn.Linear can; freeze it with requires_grad_(False), or pass it "
                f"in also=[...] if it has few elements"
            )
    return layers


def _linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer without a parametrisation."""
    return isinstance(module, nn.Linear) and "weight" in module._parameters


def _common(tensors: dict[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of all parameters.

    Raises:
        ValueError: there are no parameters, dtypes or devices differ, or the dtype is neither
            float32 nor float64.
    """
    if not tensors:
        raise ValueError("the model must have a torch.nn.Linear with trained parameters")
    first, *_ = tensors.values()
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, F64):
            raise ValueError(
                f"{name} is {tensor.dtype}, which is too coarse to solve for a step; convert the "
                f"model with model.double()"
            )
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, but other parameters are "
                f"{first.dtype} on {first.device}; convert all with model.to(...)"
            )
    return first.dtype, first.device
