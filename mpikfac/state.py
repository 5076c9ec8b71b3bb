"""Model and optimizer as named items, and back; on all ranks or on none.

`stepped` names the parameters whose optimizer state a rank keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Stepped = Mapping[str, nn.Parameter]


def model_state(model: nn.Module, optimizer: Optimizer, stepped: Stepped) -> dict[str, Any]:
    """Model and optimizer by name; of the optimizer's tensors those of `stepped`."""
    state: dict[str, Any] = {f"model/{name}": value for name, value in _tensors_of(model)}
    state["optimizer/name"] = type(optimizer).__name__
    state |= {f"optimizer/groups/{name}": value for name, value in group_settings(optimizer)}
    for name, parameter in stepped.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"optimizer/state/{name}/{key}"] = value
    return state


def missing_state(model: nn.Module, names: Collection[str]) -> set[str]:
    """What is not among `names`, of `model_state`'s names on all ranks together."""
    prefix = "optimizer/state/"
    keys = {name.rpartition("/")[2] for name in names if name.startswith(prefix)}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = {f"model/{name}" for name, _ in _tensors_of(model)}
    whole |= {f"{prefix}{name}/{key}" for name in trained for key in keys}
    return whole.difference(names)


def needed_state(
    model: nn.Module, optimizer: Optimizer, stepped: Stepped, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The number of steps, and what `load_model_state` takes from `state`.

    Raises:
        ValueError: an item is missing or not like the one that it is for, or another optimizer's.
    """
    own, saved = type(optimizer).__name__, state.get("optimizer/name")
    if saved not in (own, None):
        raise ValueError(f"item 'optimizer/name' must be {own}; it is {saved}")
    like: dict[str, Any] = {f"model/{name}": value for name, value in _tensors_of(model)}
    settings = {f"optimizer/groups/{name}": value for name, value in group_settings(optimizer)}
    like |= {name: value for name, value in settings.items() if name in state}
    found = fitting(state, like | {"trainer/steps": 0})
    # Optimizers give it shapes of their own, and make it at a parameter's first step.
    kept = tuple(f"optimizer/state/{name}/" for name, _ in stepped.items())
    return found | {name: state[name] for name in state if name.startswith(kept)}


def fitting(
    state: Mapping[str, Any], like: Mapping[str, Any], rounded: bool = False
) -> dict[str, Any]:
    """The items that `like` names, of the same dtype and shape, or numbers where it has numbers.

    Args:
        rounded: real numbers of one dtype may stand for those of another.

    Raises:
        ValueError: the first that is missing or another; its name, what is expected, what is there.
    """
    found = {}
    for name, expected in like.items():
        if name not in state:
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is missing")
        found[name] = state[name]
        if _form(found[name], rounded) != _form(expected, rounded):
            form = _form(found[name])
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is {form}")
    return found


def _form(value: object, rounded: bool = False) -> str:
    if torch.is_tensor(value):
        if rounded and value.is_floating_point():
            return f"real {list(value.shape)}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def load_model_state(
    model: nn.Module, optimizer: Optimizer, stepped: Stepped, state: Mapping[str, Any]
) -> None:
    """The inverse of `model_state`, at any number of ranks and any strategy."""
    found = {name: state[f"model/{name}"] for name, _ in _tensors_of(model)}
    model.load_state_dict(found, strict=False)
    for name, number in group_settings(optimizer):
        index, key = name.split("/")
        restored = state.get(f"optimizer/groups/{name}", number)
        flag = isinstance(number, bool)
        optimizer.param_groups[int(index)][key] = bool(restored) if flag else restored
    optimizer.state.clear()
    for name, parameter in stepped.items():
        prefix = f"optimizer/state/{name}/"
        for key in (key for key in state if key.startswith(prefix)):
            value = state[key]
            if torch.is_tensor(value):  # a count of steps stays where it is read: on the host
                value = value.to(parameter.device if value.dim() else value.device, copy=True)
            optimizer.state[parameter][key.removeprefix(prefix)] = value


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, value) for n, value in model.state_dict().items() if torch.is_tensor(value)]


def group_settings(optimizer: Optimizer) -> Iterator[tuple[str, int | float]]:
    """Index and key ("0/lr") and value of every number in the parameter groups."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, (int, float)):
                yield f"{index}/{key}", value
