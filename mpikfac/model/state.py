"""Convert a model and an optimizer to named items, and load such items on all ranks or on none.

In this module, `stepped` contains the parameters whose optimizer state is on this rank, by name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.comm import Comm, handed_over
from mpikfac.model.rows import in_rows, load_rows, stored, whole_names, without_rows
from mpikfac.numerics import is_sharded, local
from mpikfac.plan import plain
from mpikfac.plan.names import OF_GROUPS, OF_MODEL, OF_OPTIMIZER_STATE, OPTIMIZER_NAME, STEPS

Stepped = Mapping[str, nn.Parameter]
MOST_STEPS = 2**53
"""The maximum number of steps; float64 cannot count beyond it."""
MOMENTUM = "momentum_buffer"
OF_PARAMETERS = ("params", "param_names")
"""Keys of a parameter group that are not settings."""
AS_PARAMETER = (MOMENTUM, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Keys of the state of torch's optimizers whose values have the parameter's shape."""


def model_state(model: nn.Module, optimizer: Optimizer, stepped: Stepped) -> dict[str, Any]:
    """Return the items of the model and optimizer, with optimizer state only for `stepped`."""
    state: dict[str, Any] = {OF_MODEL + name: value for name, value in _tensors_of(model)}
    state[OPTIMIZER_NAME] = type(optimizer).__name__
    state |= {OF_GROUPS + name: value for name, value in group_settings(optimizer)}
    for name, parameter in stepped.items():
        for key, value in _in_pieces(optimizer.state.get(parameter, {})).items():
            item = f"{OF_OPTIMIZER_STATE}{name}/{key}"
            state |= dict(stored(item, value) if torch.is_tensor(value) else [(item, value)])
    return state


def _in_pieces(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state, with the tensors of a list as separate items: "Q.0", "Q.1".

    SOAP uses such lists, in which an empty list or an empty tensor means that there is no matrix.
    """
    present = {key: value for key, value in state.items() if value is not None}
    pieces = {k: v if torch.is_tensor(v) else plain(v) for k, v in present.items()}
    for key in [key for key, value in pieces.items() if isinstance(value, list)]:
        for index, piece in enumerate(pieces.pop(key)):
            pieces[f"{key}.{index}"] = torch.empty(0) if isinstance(piece, list) else piece
    return pieces


def _in_lists(pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_in_pieces`: return the state with its lists."""
    state: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = defaultdict(dict)
    for key, value in pieces.items():
        name, _, index = key.rpartition(".")
        if name and index.isdecimal():
            lists[name][int(index)] = value
        else:
            state[key] = value
    return state | {name: [items[i] for i in sorted(items)] for name, items in lists.items()}


def missing_state(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names in the `model_state` of all ranks that are missing from `names`.

    If a parameter has any optimizer state, that state is assumed to be complete, because Muon and
    SOAP store different items for different parameters.
    """
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
    }
    prefix, names = OF_OPTIMIZER_STATE, whole_names(names, tensors)
    items = [name.removeprefix(prefix).rpartition("/") for name in names if name.startswith(prefix)]
    held, keys = {name for name, _, _ in items}, {key for _, _, key in items}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    complete = {OF_MODEL + without_rows(name) for name, _ in _tensors_of(model)}
    complete |= {f"{prefix}{name}/{key}" for name in trained - held for key in keys}
    return complete.difference(names)


def needed_state(
    model: nn.Module, optimizer: Optimizer, stepped: Stepped, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the number of steps, and the items that `load_model_state` needs from `state`.

    Raises:
        ValueError: an item is missing, has a wrong dtype or shape, or belongs to a different
            optimizer.
    """
    kind, saved = type(optimizer).__name__, state.get(OPTIMIZER_NAME)
    if saved not in (kind, None):
        raise ValueError(f"item 'optimizer/name' must be {kind}; it is {saved}")
    like: dict[str, Any] = {OF_MODEL + name: value for name, value in _tensors_of(model)}
    like |= {OF_GROUPS + name: value for name, value in _numbers(optimizer, state).items()}
    items = fitting(state, like | {STEPS: 0})
    steps = items[STEPS]
    if not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"item 'trainer/steps' must be a number of steps; it is {steps}")
    return items | _optimizer_state(stepped, state)


def _optimizer_state(stepped: Stepped, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state of `stepped`; a parameter has none before its first step.

    Raises:
        ValueError: an item is a string, an infinite number or NaN, or its shape differs from that
            of the parameter; shapes are not checked for items that only optimizers outside of torch
            create.
    """
    items: dict[str, Any] = {}
    for key in (key for key in state if key.startswith(OF_OPTIMIZER_STATE)):
        name, _, kind = key.removeprefix(OF_OPTIMIZER_STATE).rpartition("/")
        if name in stepped:
            shaped = kind in AS_PARAMETER or _has_rows(state[key], stepped[name])
            item = in_rows(key, stepped[name]) if shaped else key
            like = local(stepped[name]) if shaped else state[key]
            items |= fitting(state, {item: like}, rounded=True)
            if isinstance(items[item], str):
                raise ValueError(f"item {key!r} must be a tensor or a number; it is a str")
    return items


def _has_rows(value: Any, parameter: Tensor) -> bool:
    """Return whether a value is stored by rows, because it has a sharded parameter's shape."""
    return is_sharded(parameter) and torch.is_tensor(value) and value.shape == parameter.shape


def fitting(
    state: Mapping[str, Any], like: Mapping[str, Any], rounded: bool = False
) -> dict[str, Any]:
    """Return the items named in `like`; their dtypes and shapes, or types, must be as in `like`.

    A tensor that shares memory with the one in `like`, as in the trainer's own state, is copied.

    Args:
        rounded: whether a floating-point tensor may have a different floating-point dtype.

    Raises:
        ValueError: an item is missing or differs, or a number is infinite or NaN; the message names
            the first such item, and states what is expected and what was found.
    """
    items = {}
    for name, expected in like.items():
        if name not in state:
            raise ValueError(f"item {name!r} is missing; it must be {_form(expected)}")
        items[name] = state[name] if torch.is_tensor(expected) else plain(state[name])
        if _alias(items[name], expected):
            items[name] = items[name].clone()
        if _form(items[name], rounded) != _form(expected, rounded):
            form = _form(items[name])
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is {form}")
        if isinstance(items[name], float) and not math.isfinite(items[name]):
            raise ValueError(f"item {name!r} must be a finite number; it is {items[name]}")
    return items


def _alias(x: Any, y: Any) -> bool:
    """Return whether two tensors share memory."""
    return torch.is_tensor(x) and torch.is_tensor(y) and x.data_ptr() == y.data_ptr()


def _form(value: object, rounded: bool = False) -> str:
    if torch.is_tensor(value):
        if rounded and value.is_floating_point():
            return f"real {list(value.shape)}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def load_model_state(
    model: nn.Module, optimizer: Optimizer, stepped: Stepped, state: Mapping[str, Any]
) -> None:
    """Load a `model_state`, on any number of ranks and with any strategy."""
    values = {name: state[OF_MODEL + name] for name, _ in _tensors_of(model)}
    model.load_state_dict(values, strict=False)
    load_rows(model, values)
    for name in _numbers(optimizer, state):
        set_group_setting(optimizer, name, state[OF_GROUPS + name])
    optimizer.state.clear()
    for name, parameter in stepped.items():
        prefix, pieces = f"{OF_OPTIMIZER_STATE}{name}/", {}
        for key in (key for key in state if key.startswith(prefix)):
            value = _placed(state[key], parameter, optimizer)
            pieces[without_rows(key).removeprefix(prefix)] = value
        if pieces:
            optimizer.state[parameter] = _in_lists(pieces)


def _placed(value: Any, parameter: nn.Parameter, optimizer: Optimizer) -> Any:
    """Return a copy of `value` on the parameter's device, in the parameter's memory layout.

    Step counts stay on the host, where they are read, unless a fused or captured step reads them on
    the device.
    """
    if not torch.is_tensor(value):
        return value
    groups = optimizer.param_groups
    read_there = any(group.get("fused") or group.get("capturable") for group in groups)
    if is_sharded(parameter) and value.shape == local(parameter).shape and value.dim():
        sharded = torch.empty_like(parameter, dtype=value.dtype)
        local(sharded).copy_(value)
        return sharded
    on_device = value.dim() or read_there
    return laid_out(value.to(parameter.device if on_device else value.device, copy=True), parameter)


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """Return `value` in the parameter's memory layout or, if the shapes differ, row by row.

    The order of summation, and therefore the rounding, depends on the layout.
    """
    if value.shape != parameter.shape:
        return value.contiguous()
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _numbers(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers in parameter groups that `state` contains, by index and key ("0/lr").

    Some optimizers add a number, such as the number of steps, to a group in their first step.
    Before that step, this function returns 0 for such a number in `state`.
    """
    numbers = dict(group_settings(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        prefix = f"{OF_GROUPS}{index}/"
        keys = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        # Sorted, because the order of a set differs between ranks.
        added = sorted(key for key in keys if "." not in key and key not in group)
        numbers |= {f"{index}/{key}": 0 for key in added}
    return {key: value for key, value in numbers.items() if OF_GROUPS + key in state}


def hand_over_state(
    comm: Comm, model: nn.Module, optimizer: Optimizer, before: Stepped, after: Stepped
) -> None:
    """Send the optimizer's state to the ranks that will update the parameters.

    Collective over: comm.

    Args:
        before: the parameters that the rank has updated, by name.
        after: the parameters that the rank will update, by name.
    """
    present = dict(model.named_parameters())
    held = {
        f"{name}/{key}": value
        for name, parameter in before.items()
        if present.get(name) is parameter  # otherwise, the parameter was replaced
        for key, value in _in_pieces(optimizer.state.get(parameter, {})).items()
    }
    of_all = {item for of_rank in comm.allgather(list(held)) for item in of_rank}
    lacking = {item for item in of_all - held.keys() if item.rpartition("/")[0] in after}
    received: dict[str, dict[str, Any]] = defaultdict(dict)
    for item, value in handed_over(comm, held, lacking).items():
        name, _, key = item.rpartition("/")
        received[name][key] = _placed(value, after[name], optimizer)
    for name, pieces in received.items():
        optimizer.state[after[name]] |= _in_lists(pieces)
    for name in before.keys() - after.keys():
        optimizer.state.pop(before[name], None)


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = [(n, value) for n, value in model.state_dict().items() if torch.is_tensor(value)]
    return [item for name, tensor in tensors for item in stored(name, tensor)]


def group_settings(optimizer: Optimizer) -> Iterator[tuple[str, int | float]]:
    """Yield the key ("0/lr") and value of every number in the parameter groups.

    The key of a number in a tuple or list contains its index there ("0/betas.1").
    """
    yield from settings_in(optimizer.param_groups)


def settings_in(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int | float]]:
    """Yield the key and value of every number in parameter groups, as `group_settings` does."""
    for index, group in enumerate(groups):
        for key, value in group.items():
            several = isinstance(value, (tuple, list)) and key not in OF_PARAMETERS
            places = enumerate(value) if several else ()
            numbers = {f"{key}.{place}": entry for place, entry in places} or {key: value}
            for name, entry in numbers.items():
                number = plain(entry)
                if isinstance(number, (int, float)):
                    yield f"{index}/{name}", number


def unstored_settings(optimizer: Optimizer) -> Iterator[str]:
    """Yield the index, key and type of each parameter-group value that a state cannot store."""
    stored = {name.partition(".")[0] for name, _ in group_settings(optimizer)}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            chosen = key in OF_PARAMETERS or isinstance(value, (str, NoneType))
            if not chosen and f"{index}/{key}" not in stored:
                yield f"{index}/{key} ({type(value).__name__})"


def set_group_setting(optimizer: Optimizer, name: str, number: int | float) -> None:
    """Set a number in a parameter group by its key, as yielded by `group_settings`."""
    index, key = name.split("/")
    group, (key, _, place) = optimizer.param_groups[int(index)], key.partition(".")
    present = group[key][int(place)] if place else group.get(key)
    if torch.is_tensor(present):  # a learning rate that a compiled step reads
        present.fill_(number)
        return
    value = bool(number) if isinstance(present, bool) else number
    if not place:
        group[key] = value
        return
    values = list(group[key])
    values[int(place)] = value
    group[key] = type(group[key])(values)
