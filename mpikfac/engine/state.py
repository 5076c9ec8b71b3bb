"""Model and optimizer as named items, and back; on all ranks or on none.

`stepped` names the parameters with optimizer state on the rank.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpikfac
from mpikfac.comm import SUMMABLE, Comm, handed_over
from mpikfac.layers import Layer, Other, in_words
from mpikfac.plan import Strategy

Stepped = Mapping[str, nn.Parameter]
MOST_STEPS = 2**53
"""A larger number of steps is a mistake: float64 counts no further."""
MOMENTUM = "momentum_buffer"
AS_PARAMETER = (MOMENTUM, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""State of torch's optimizers with a parameter's shape."""


def model_state(model: nn.Module, optimizer: Optimizer, stepped: Stepped) -> dict[str, Any]:
    """Return model and optimizer by name, with the optimizer's tensors of `stepped` only."""
    state: dict[str, Any] = {f"model/{name}": value for name, value in _tensors_of(model)}
    state["optimizer/name"] = type(optimizer).__name__
    state |= {f"optimizer/groups/{name}": value for name, value in group_settings(optimizer)}
    for name, parameter in stepped.items():
        for key, value in _in_pieces(optimizer.state.get(parameter, {})).items():
            state[f"optimizer/state/{name}/{key}"] = value
    return state


def _in_pieces(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state, with the tensors of a list one by one: "Q.0", "Q.1".

    SOAP has such lists; an empty list in a list stands for no matrix, as does an empty tensor.
    """
    pieces = {key: value for key, value in state.items() if value is not None}
    for key in [key for key, value in pieces.items() if isinstance(value, list)]:
        for index, piece in enumerate(pieces.pop(key)):
            pieces[f"{key}.{index}"] = torch.empty(0) if isinstance(piece, list) else piece
    return pieces


def _in_lists(pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `_in_pieces` took apart."""
    state: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = defaultdict(dict)
    for key, value in pieces.items():
        name, _, index = key.rpartition(".")
        if name and index.isdecimal():
            lists[name][int(index)] = value
        else:
            state[key] = value
    return state | {name: [found[i] for i in sorted(found)] for name, found in lists.items()}


def missing_state(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names that `model_state` has on all ranks together and that `names` lack.

    The state of a parameter is held as a whole or not at all. Muon and SOAP keep different items
    for different parameters.
    """
    prefix = "optimizer/state/"
    items = [name.removeprefix(prefix).rpartition("/") for name in names if name.startswith(prefix)]
    held, keys = {name for name, _, _ in items}, {key for _, _, key in items}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    whole = {f"model/{name}" for name, _ in _tensors_of(model)}
    whole |= {f"{prefix}{name}/{key}" for name in trained - held for key in keys}
    return whole.difference(names)


def needed_state(
    model: nn.Module, optimizer: Optimizer, stepped: Stepped, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the number of steps, and the items that `load_model_state` takes from `state`.

    Raises:
        ValueError: an item is missing, has a wrong dtype or shape, or belongs to a different
            optimizer.
    """
    own, saved = type(optimizer).__name__, state.get("optimizer/name")
    if saved not in (own, None):
        raise ValueError(f"item 'optimizer/name' must be {own}; it is {saved}")
    like: dict[str, Any] = {f"model/{name}": value for name, value in _tensors_of(model)}
    like |= {
        f"optimizer/groups/{name}": value for name, value in _numbers(optimizer, state).items()
    }
    found = fitting(state, like | {"trainer/steps": 0})
    steps = found["trainer/steps"]
    if not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"item 'trainer/steps' must be a number of steps; it is {steps}")
    return found | _optimizer_state(stepped, state)


def _optimizer_state(stepped: Stepped, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `stepped`: optimizers make them at a parameter's first step.

    Raises:
        ValueError: an item has another shape than the parameter. Optimizers that are not torch's
            may choose shapes of their own.
    """
    found: dict[str, Any] = {}
    for key in (key for key in state if key.startswith("optimizer/state/")):
        name, _, kind = key.removeprefix("optimizer/state/").rpartition("/")
        if name in stepped:
            like = stepped[name] if kind in AS_PARAMETER else state[key]
            found |= fitting(state, {key: like}, rounded=True)
            if isinstance(found[key], str):
                raise ValueError(f"item {key!r} must be a tensor or a number; it is a str")
    return found


def fitting(
    state: Mapping[str, Any], like: Mapping[str, Any], rounded: bool = False
) -> dict[str, Any]:
    """Return the items named in `like`, if dtypes and shapes agree, and numbers match numbers.

    Args:
        rounded: real numbers may have a different real dtype.

    Raises:
        ValueError: an item is missing or differs; name, expected form and found form of the first.
    """
    found = {}
    for name, expected in like.items():
        if name not in state:
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is missing")
        found[name] = state[name]
        if _form(found[name], rounded) != _form(expected, rounded):
            form = _form(found[name])
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is {form}")
        if isinstance(found[name], float) and not math.isfinite(found[name]):
            raise ValueError(f"item {name!r} must be a finite number; it is {found[name]}")
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
    """Load a `model_state`, at any number of ranks and with any strategy."""
    found = {name: state[f"model/{name}"] for name, _ in _tensors_of(model)}
    model.load_state_dict(found, strict=False)
    for name, number in _numbers(optimizer, state).items():
        index, key = name.split("/")
        restored = state[f"optimizer/groups/{name}"]
        flag = isinstance(number, bool)
        group = optimizer.param_groups[int(index)]
        if torch.is_tensor(group.get(key)):  # a rate that a compiled step reads
            group[key].fill_(restored)
        else:
            group[key] = bool(restored) if flag else restored
    optimizer.state.clear()
    for name, parameter in stepped.items():
        prefix, pieces = f"optimizer/state/{name}/", {}
        for key in (key for key in state if key.startswith(prefix)):
            pieces[key.removeprefix(prefix)] = _placed(state[key], parameter)
        if pieces:
            optimizer.state[parameter] = _in_lists(pieces)


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    """Return a copy on the parameter's device; counts of steps stay on the host, to be read."""
    if not torch.is_tensor(value):
        return value
    return value.to(parameter.device if value.dim() else value.device, copy=True)


def _numbers(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of parameter groups that `state` has, by index and key ("0/lr").

    Some optimizers add a number to a group at the first step, for example the number of steps.
    Such a number of `state` counts as 0 here, before the first step.
    """
    numbers = dict(group_settings(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        prefix = f"optimizer/groups/{index}/"
        keys = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        added = sorted(keys - group.keys())  # a set has another order on each rank
        numbers |= {f"{index}/{key}": 0 for key in added}
    return {key: value for key, value in numbers.items() if f"optimizer/groups/{key}" in state}


def hand_over_state(
    comm: Comm, model: nn.Module, optimizer: Optimizer, before: Stepped, after: Stepped
) -> None:
    """Move the optimizer's state to the ranks that step the parameters from now on.

    Collective over: comm.

    Args:
        before: the parameters that the rank has stepped, by name.
        after: the parameters that the rank steps from now on.
    """
    present = dict(model.named_parameters())
    held = {
        f"{name}/{key}": value
        for name, parameter in before.items()
        if present.get(name) is parameter  # else the parameter was replaced
        for key, value in _in_pieces(optimizer.state.get(parameter, {})).items()
    }
    every = {item for some in comm.allgather(list(held)) for item in some}
    wanted = {item for item in every - held.keys() if item.rpartition("/")[0] in after}
    received: dict[str, dict[str, Any]] = defaultdict(dict)
    for item, value in handed_over(comm, held, wanted).items():
        name, _, key = item.rpartition("/")
        received[name][key] = _placed(value, after[name])
    for name, pieces in received.items():
        optimizer.state[after[name]] |= _in_lists(pieces)
    for name in before.keys() - after.keys():
        optimizer.state.pop(before[name], None)


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, value) for n, value in model.state_dict().items() if torch.is_tensor(value)]


def group_settings(optimizer: Optimizer) -> Iterator[tuple[str, int | float]]:
    """Yield index and key ("0/lr") and value of every number in the parameter groups."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            number = value.item() if torch.is_tensor(value) and not value.dim() else value
            if isinstance(number, (int, float)):
                yield f"{index}/{key}", number


Block = Layer | Other
LIBRARY = Path(__file__).parents[1]

log = logging.getLogger("mpikfac")


def common_type(blocks: Sequence[Block]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype to compute in, and the device, of tensors with a common dtype and device.

    The dtype is the dtype of the tensors, but float32 for bfloat16, whose digits are too few for
    sums.

    Raises:
        ValueError: nothing is trained, or a tensor differs from the first tensor.
    """
    tensors = [(block.name, tensor) for block in blocks for tensor in _tensors(block)]
    if not tensors:
        raise ValueError("the model has no parameter that requires a gradient")
    name, first = tensors[0]
    dtype = torch.float32 if first.dtype == torch.bfloat16 else first.dtype
    if dtype not in SUMMABLE:
        allowed = " or ".join(map(str, (torch.bfloat16, *SUMMABLE)))
        raise ValueError(f"{name} is {first.dtype}; parameters must be {allowed}")
    for other, tensor in tensors:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{other} is {tensor.dtype} on {tensor.device} but {name} is {first.dtype} on "
                f"{first.device}; all trained parameters and buffers must share both"
            )
    return dtype, first.device


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return versions, model and optimizer in short, for ranks to compare."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in tensors]
    groups = [
        [names.get(id(p), "a parameter of another model") for p in group["params"]]
        for group in optimizer.param_groups
    ]
    numbers = dict(group_settings(optimizer))
    return {
        "mpikfac version": mpikfac.__version__,
        "mpikfac's code": _digest([path.read_bytes() for path in sorted(LIBRARY.rglob("*.py"))]),
        "torch version": torch.__version__,
        "model": _digest(shapes),
        "optimizer": f"{type(optimizer).__name__} {numbers}",
        "optimizer's parameters": _digest(groups),
    }


def check_optimizer(optimizer: Optimizer) -> None:
    """Return if an averaged gradient is enough for a step of the optimizer.

    Raises:
        ValueError: the object is no optimizer, or the optimizer needs a closure.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer={type(optimizer).__name__} must be a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer=LBFGS needs a closure; take an optimizer whose step needs none")


def check_synchronous(strategy: Strategy) -> None:
    """Return if all ranks step the model together.

    Raises:
        ValueError: clients send updates to servers.
    """
    if strategy.exchange.asynchronous:
        raise ValueError("exchanged='updates' needs the trainer mpikfac.Asynchronous")


def check_momentum(optimizer: Optimizer, strategy: Strategy, of_gradients: float = 0.0) -> None:
    """Return if a momentum is taken once: before the sums, before K-FAC, or by the optimizer.

    Args:
        of_gradients: the momentum of averaged gradients, before K-FAC preconditions gradients.

    Raises:
        ValueError: two momenta are given.
    """
    top = strategy.transport.wires.top_momentum
    if top and of_gradients:
        raise ValueError(
            f"top_momentum={top} and Length(momentum={of_gradients}): leave one of them out; "
            "the training program takes momentum=0"
        )
    name, asked = ("top_momentum", top) if top else ("Length(momentum)", of_gradients)
    when = "are added up" if top else "are preconditioned"
    for group in optimizer.param_groups:
        own = group.get("momentum", group.get("betas", (0.0,))[0])
        if asked and own:
            raise ValueError(
                f"{name}={asked} needs an optimizer without momentum, not with {own}: the "
                f"momentum is taken before gradients {when}"
            )


def check_loaded_momentum(
    items: Mapping[str, Any], names: Collection[str], of_gradients: float = 0.0
) -> None:
    """Return if a state and the settings give a momentum to the gradients or to the optimizer.

    Args:
        items: the items of model and optimizer that are loaded.
        names: names of all items of the state.

    Raises:
        ValueError: the momentum would be taken twice, or never.
    """
    if not of_gradients and any(name.startswith("kfac/momentum/") for name in names):
        raise ValueError(
            "the state has momenta of gradients, and no momentum of the optimizer; train with "
            "KFAC and Length(momentum=...) as before, in the training program "
            "kfac.momentum_of=gradients"
        )
    for name, value in items.items():
        of_group = name.startswith("optimizer/groups/") and name.endswith("/momentum")
        if of_group and of_gradients and value:
            raise ValueError(
                f"item {name!r} must be 0 with Length(momentum={of_gradients}); it is {value}: go "
                "on without Length(momentum), in the training program kfac.momentum_of=directions"
            )


def check_plain(optimizer: Optimizer) -> None:
    """Return if a step of the optimizer subtracts the gradients as they are.

    Raises:
        ValueError: the optimizer changes gradients.
    """
    plain = {"lr": 1, "momentum": 0, "weight_decay": 0, "maximize": False}
    for group in optimizer.param_groups:
        own = {name: group.get(name) for name in plain}
        if type(optimizer) is not torch.optim.SGD or own != plain:
            numbers = ", ".join(f"{n}={v:g}" for n, v in own.items() if v not in (None, plain[n]))
            raise ValueError(
                f"optimizer={type(optimizer).__name__}({numbers}) must be SGD(lr=1, momentum=0, "
                f"weight_decay=0): length='quadratic' gives length and momentum of a step"
            )


def groups_of(layers: Iterable[Layer], optimizer: Optimizer) -> dict[str, list[int]]:
    """Return the optimizer's parameter groups of every layer's weight and bias.

    Raises:
        ValueError: a weight or a bias is in no group.
    """
    group_of = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    groups = {}
    for layer in layers:
        if any(id(parameter) not in group_of for parameter in layer.parameters):
            raise ValueError(
                f"layer {layer.name!r} is covered but not all of it is in the optimizer; "
                f"give it to the optimizer or add it to skip"
            )
        groups[layer.name] = [group_of[id(parameter)] for parameter in layer.parameters]
    return groups


def report_others(
    model: nn.Module,
    layers: Iterable[Layer],
    others: Iterable[Other],
    optimizer: Optimizer,
    offers: Iterable[str] = (),
) -> None:
    """Log the parameters trained without K-FAC, how to cover some, and parameters not trained.

    Warn if K-FAC covers less than half of the weights.
    """
    others = list(others)
    covered = sum(p.numel() for layer in layers for p in layer.parameters)
    every = covered + sum(p.numel() for other in others for p in other.parameters)
    if 2 * covered < every:
        log.warning(
            "K-FAC covers %d of %d weights; the rest is trained first-order", covered, every
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = [other for other in others if other.parameters]
    names = [other.name for other in parameters if id(other.tensor) in stepped]
    words = in_words(model, names) or "none"
    log.info("trained first-order, as no layer covers them: %s", words)
    for offer in offers:
        log.warning("%s", offer)
    forgotten = ", ".join(other.name for other in parameters if id(other.tensor) not in stepped)
    if forgotten:
        log.warning("not trained, as the optimizer does not have them: %s", forgotten)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _tensors(block: Block) -> Sequence[Tensor]:
    return block.parameters if isinstance(block, Layer) else [block.tensor]
