"""Find layers that can be split, pairs of consecutive layers, and the sizes of layers' calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.plan import LayerCall

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CAN_SPLIT = (nn.Linear, *CONVOLUTIONS)
# Modules that act on each element separately.
BY_NUMBER = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout),
)
# Modules that act on each channel of each example separately.
POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def refusal(model: nn.Module, name: str) -> str:
    """Return the reason why a layer cannot be split, or "" if it can."""
    module = dict(model.named_modules()).get(name)
    if module is None:
        return "the model has no module with this name"
    if type(module) not in CAN_SPLIT:
        kinds = ", ".join(kind.__name__ for kind in CAN_SPLIT)
        return f"{type(module).__name__} cannot be split; only {kinds} can"
    if getattr(module, "groups", 1) != 1:
        return f"a convolution with groups={module.groups} cannot be split; only groups=1 can"
    if "weight" not in module._parameters or module._forward_pre_hooks:
        return "the weight is computed in every pass, or a hook changes the input"
    if module._compiled_call_impl is not None:
        return "the module is compiled; split layers before torch.compile"
    parameters = {id(parameter) for parameter in module.parameters()}
    holders = [
        path
        for path, holder in model.named_modules(remove_duplicate=False)
        if parameters.intersection(map(id, holder.parameters(recurse=False)))
    ]
    return f"the parameters are shared: {', '.join(holders)}" if len(holders) > 1 else ""


def layers_before(model: nn.Module) -> dict[str, str]:
    """Return, for each layer, the preceding layer in a `Sequential` that can pass slices to it.

    All modules between the two act on each channel separately. The preceding layer is called only
    by the `Sequential`, so its outputs reach only the next module.
    """
    before: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Sequential:
            prefix = f"{name}." if name else ""
            for first, second in _pairs(list(module._modules.items())):
                before[prefix + second] = prefix + first
    return before


def _pairs(children: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of layers between which all modules act on each channel separately."""
    before: tuple[str, nn.Module] | None = None
    flat = False
    for name, module in children:
        kind = type(module)
        if kind in CAN_SPLIT:
            if before and _joins(before[1], module, flat):
                yield before[0], name
            before, flat = (name, module), False
        elif kind is nn.Flatten and before and not flat:
            complete = (module.start_dim, module.end_dim) == (1, -1)
            before, flat = (before if complete and not _is_linear(before[1]) else None), True
        elif kind in POOLS and before and not flat and not _is_linear(before[1]):
            before = None if getattr(module, "return_indices", False) else before
        elif kind not in BY_NUMBER:
            before = None


def _joins(first: nn.Module, second: nn.Module, flat: bool) -> bool:
    """Return whether slices of the outputs of `first` are slices of the inputs of `second`."""
    if _is_linear(second):
        return _is_linear(first) or flat
    return not _is_linear(first) and not flat


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def layer_calls(model: nn.Module, *inputs: Any) -> list[LayerCall]:
    """Return the calls of all layers that can be split, in the order of the forward pass.

    The forward pass runs on a copy of the model on torch's meta device, without values.

    Args:
        inputs: the model's arguments for a rank's batch; only their shapes matter.
    """
    shapes = copy.deepcopy(model).to("meta")
    before, seen = layers_before(model), dict[str, LayerCall]()
    for name, module in shapes.named_modules():
        if type(module) in CAN_SPLIT and not refusal(model, name):
            follows = before.get(name, "")
            module.register_forward_hook(partial(_note, seen, name, follows))
    with torch.enable_grad():
        shapes(*(x.to("meta") if torch.is_tensor(x) else x for x in inputs))
    return [call if call.follows in seen else replace(call, follows="") for call in seen.values()]


def _note(
    seen: dict[str, LayerCall],
    name: str,
    follows: str,
    module: Any,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    """Add a call's sizes to the totals of the layer's calls in `seen`."""
    x, older = inputs[0], seen.get(name)
    seen[name] = LayerCall(
        name,
        tuple(module.weight.shape),
        module.bias is not None,
        x.numel() + (older.taken if older else 0),
        output.numel() + (older.given if older else 0),
        x.requires_grad or (older is not None and older.differentiated),
        follows,
    )
