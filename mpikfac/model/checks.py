"""Check what a step requires of the model and optimizer, and collect what ranks compare."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import mpikfac
from mpikfac.comm import SUMMABLE
from mpikfac.errors import UserError
from mpikfac.layers import Layer, Other, in_words, skipping
from mpikfac.model.descent import Descent
from mpikfac.model.state import group_settings
from mpikfac.plan import Fisher, Form, NoGrafting, Strategy
from mpikfac.settings import Schedule, Settings

Block = Layer | Other
OF_COMPRESSION = "compression.gradients.momentum"
LARGEST_RATE = 0.05  # the largest plausible learning rate for steps as long as Adam's
LIBRARY = Path(__file__).parents[1]

log = logging.getLogger("mpikfac")


def common_type(blocks: Sequence[Block]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device for computing with the blocks' parameters and statistics.

    All of them must have one dtype and device. The returned dtype is theirs, but float32 for
    bfloat16, which is too coarse for sums.

    Raises:
        ValueError: no parameter is trained, the dtype is not supported, or a tensor's dtype or
            device differs from that of the first tensor.
    """
    tensors = [(block.name, tensor) for block in blocks for tensor in _tensors(block)]
    if not tensors:
        raise ValueError("the model has no parameter that requires a gradient")
    name, first = tensors[0]
    dtype = torch.float32 if first.dtype == torch.bfloat16 else first.dtype
    if dtype not in SUMMABLE:
        allowed = " or ".join(map(str, (torch.bfloat16, *SUMMABLE)))
        remedy = (
            "register the real tensor torch.view_as_real(parameter), and call view_as_complex in "
            "forward"
            if first.is_complex()
            else "convert the model with to(torch.float32)"
        )
        raise ValueError(
            f"{name} is {first.dtype}; trained parameters must be {allowed}: {remedy}, or freeze "
            f"it with requires_grad_(False)"
        )
    for different, tensor in tensors:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{different} is {tensor.dtype} on {tensor.device}, but {name} is {first.dtype} on "
                f"{first.device}; trained parameters and running statistics must agree in both: "
                f"convert all with model.to(...), use torch.autocast to compute in 16 bits, or "
                f"freeze {different}"
            )
    return dtype, first.device


def check_tensors(model: nn.Module) -> None:
    """Check that parameters and buffers can be sent and stored directly from memory.

    Raises:
        ValueError: a tensor has no shape yet, is sparse or quantised, or is a lazily computed view.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet; call the model before creating the trainer")
        for wrong, kind, plain in (
            (tensor.layout != torch.strided, f"{tensor.layout}", "to_dense"),
            (tensor.is_quantized, "quantized", "dequantize"),
            (tensor.is_conj(), "a conjugate view", "resolve_conj"),
        ):
            if wrong:
                raise ValueError(f"{name} is {kind}, but must be a plain tensor; use its {plain}()")


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return summaries of versions, model and optimizer, for ranks to compare."""
    names = {id(p): name for name, p in model.named_parameters()}
    shapes = describe_tensors(model)
    groups = [
        [names.get(id(p), "a parameter of another model") for p in group["params"]]
        for group in optimizer.param_groups
    ]
    numbers = dict(group_settings(optimizer))
    return {
        "mpikfac version": mpikfac.__version__,
        "mpikfac's code": _digest([path.read_bytes() for path in sorted(LIBRARY.rglob("*.py"))]),
        "torch version": torch.__version__,
        "model": _digest([*shapes.items()]),
        "optimizer": f"{type(optimizer).__name__} {numbers}",
        "optimizer's parameters": _digest(groups),
    }


def describe_tensors(model: nn.Module) -> dict[str, str]:
    """Return each parameter's and buffer's shape and dtype as text, and whether it is trained."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {
        f"tensor {n!r}": f"{list(t.shape)} {t.dtype}{' trained' if t.requires_grad else ''}"
        for n, t in tensors
    }


def members(optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters in the groups of an optimizer."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def check_owned(optimizer: Optimizer, blocks: Iterable[Block], strategy: Strategy) -> None:
    """Check that the optimizer contains all parameters that owners update.

    Raises:
        ValueError: with `shard_optimizer`, a trained parameter is not in the optimizer.
    """
    if strategy.assignment.shard_optimizer:
        stepped = members(optimizer)
        for block in blocks:
            if not stepped.issuperset(block.parameters):
                raise ValueError(
                    f"assignment.shard_optimizer=True needs {block.name!r} in the optimizer, "
                    f"because an optimizer other than the trainer's would get its gradient only "
                    f"on the owner; freeze it, or use strategy='comm-opt'"
                )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that the model's averaged gradients are all that the optimizer needs for a step.

    Raises:
        ValueError: `optimizer` is not an optimizer, lacks `param_groups` or `state`, cannot step
            without an argument such as a closure, or updates parameters that the model lacks.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer={type(optimizer).__name__} must be a torch.optim.Optimizer")
    for name in ("param_groups", "state"):
        if not hasattr(optimizer, name):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has no {name}; call super().__init__() in "
                f"its constructor, or set {name} to that of the optimizer that it wraps"
            )
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:  # "missing a required argument: 'closure'"
        raise ValueError(
            f"optimizer={type(optimizer).__name__} cannot step: {error}; use an optimizer whose "
            f"step() requires no arguments"
        ) from None
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    check_foreign(stepped, model)


def check_foreign(stepped: Iterable[Tensor], model: nn.Module) -> None:
    """Check that the parameters that an optimizer steps belong to the model.

    Raises:
        ValueError: the optimizer would update parameters that the model lacks.
    """
    of_model = {id(p) for p in model.parameters()}
    if foreign := [tuple(p.shape) for p in stepped if id(p) not in of_model]:
        raise ValueError(
            f"the optimizer has {len(foreign)} trained parameters that the model lacks (the first "
            f"has shape {foreign[0]}), and every rank would update its own copy; put their module, "
            f"such as a loss with weights, into the model"
        )


def check_kind(name: str, value: object, kind: type) -> None:
    """Check that `value` is an instance of `kind`, or None.

    Raises:
        ValueError: `value` is anything else, such as a string in place of a `Grafting`.
    """
    if value is not None and not isinstance(value, kind):
        usual = {"grafting": "AdamGrafting", "clip": "KLClip"}.get(name, kind.__name__)
        raise ValueError(f"{name}={value!r} must be None or mpikfac.{usual}(...)")


def check_synchronous(strategy: Strategy) -> None:
    """Check that all ranks update the model together.

    Raises:
        ValueError: the strategy is asynchronous, with clients that send updates to servers.
    """
    if not strategy.sync.waits_for_all:
        raise ValueError(f"sync={strategy.sync.name!r} needs the trainer mpikfac.lab.AsyncSGD")


def _momentum_of_compression(strategy: Strategy) -> float:
    """Return the momentum that the encoding of gradients applies."""
    compressor = strategy.compression.gradients
    return 0.0 if compressor is None else compressor.momentum


def check_momentum(
    optimizer: Optimizer, strategy: Strategy, of_gradients: float | Schedule = 0.0
) -> None:
    """Check that momentum is applied only once: by the compression, K-FAC or the optimizer.

    Args:
        of_gradients: the momentum of averaged gradients, before K-FAC preconditions them.

    Raises:
        ValueError: momentum would be applied twice.
    """
    top = _momentum_of_compression(strategy)
    if top and of_gradients:
        raise ValueError(
            f"{OF_COMPRESSION}={top} and grafting.momentum={of_gradients} exclude each other; "
            f"leave one of them out"
        )
    name, of_kfac = (OF_COMPRESSION, top) if top else ("grafting.momentum", of_gradients)
    when = "are reduced" if top else "are preconditioned"
    if isinstance(optimizer, Descent):  # whose momentum is `of_gradients`
        if not of_gradients and any(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(
                "KFACOptimizer(momentum=0) cannot use the momentum of a group or a scheduler; set "
                "the momentum of KFACOptimizer, or pass cycle_momentum=False to the scheduler"
            )
        return
    for group in optimizer.param_groups:
        of_optimizer = group.get("momentum", group.get("betas", (0.0,))[0])
        if of_kfac and of_optimizer:
            number = "..." if callable(of_kfac) else of_kfac
            raise ValueError(
                f"{name}={number} needs an optimizer with momentum 0, not {of_optimizer}, "
                f"because momentum is applied before gradients {when} (a scheduler that changes "
                f"momentum needs cycle_momentum=False, or mpikfac.KFACOptimizer)"
            )


def check_loaded_momentum(
    items: Mapping[str, Any],
    names: Collection[str],
    strategy: Strategy,
    of_gradients: float | Schedule = 0.0,
    descends: bool = False,
) -> None:
    """Check that a loaded state's momentum is applied exactly once; see `check_momentum`.

    Args:
        items: the items of the model and optimizer that are loaded, by name.
        names: the names of all items of the state.
        descends: whether the optimizer is a `Descent`, whose momentum is `of_gradients`.

    Raises:
        ValueError: the momentum would be applied twice, or never.
    """
    if not of_gradients and any(name.startswith("kfac/momentum/") for name in names):
        raise ValueError(
            "the state contains gradient momentum, but no optimizer momentum; continue with "
            "KFAC and grafting=AdamGrafting(momentum=...), as before"
        )
    top = _momentum_of_compression(strategy)
    choice = f"{OF_COMPRESSION}={top}" if top else f"grafting.momentum={of_gradients}"
    remedy = OF_COMPRESSION if top else "grafting.momentum"
    for name, value in items.items():
        of_group = name.startswith("optimizer/groups/") and name.endswith("/momentum")
        if of_group and not descends and (top or of_gradients) and value:
            raise ValueError(
                f"item {name!r} must be 0 with {choice}; it is {value}: continue without {remedy}"
            )


@contextmanager
def taking_up() -> Iterator[None]:
    """Re-raise a `ValueError` in the body as a failure to adopt changed trained parameters.

    Raises:
        UserError: the change cannot be adopted.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"the trained parameters have changed, and the change cannot be adopted: {error}"
        ) from error


def check_habits(
    optimizer: Optimizer, settings: Settings, fisher: Fisher, preconditioner: Form
) -> Iterator[str]:
    """Yield warnings about settings that suit other methods, but make K-FAC perform badly."""
    unbounded = isinstance(settings.grafting, NoGrafting) and settings.clip is None
    if unbounded and preconditioner.of == "gradient":
        yield (
            f"NoGrafting() without a clip can diverge: the factors of {preconditioner.name!r} "
            f"contain a single gradient at first, so the next directions can be very long; set "
            f"clip=NormClip(max_norm=1.0), or use AdamGrafting(orthogonalize=False)"
        )
    elif unbounded and fisher == "empirical":
        yield (
            "NoGrafting() without a clip can diverge: with the empirical Fisher, directions grow "
            "as gradients shrink; set clip=KLClip(kl_clip=0.001), or use AdamGrafting()"
        )
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if settings.grafting.by_adam and rates and max(rates) > LARGEST_RATE:
        yield (
            f"lr={max(rates):g} is a learning rate for SGD; with {settings.grafting!r}, use 0.005 "
            f"to 0.01, because steps are as long as Adam's"
        )
    if any("betas" in group for group in optimizer.param_groups):
        yield (
            f"{type(optimizer).__name__} rescales K-FAC's directions by its own averages of "
            f"their squares; use mpikfac.KFACOptimizer, or KFAC with torch.optim.SGD"
        )


def check_rates(optimizer: Optimizer, choice: str) -> None:
    """Check that all groups of the optimizer have a learning rate.

    Raises:
        ValueError: a group has no learning rate; the message says that `choice` needs one.
    """
    if not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{choice} needs learning rates, but {type(optimizer).__name__} has a group of "
            f"parameters without 'lr'; set the group's 'lr', by which its steps are multiplied"
        )


def check_plain(optimizer: Optimizer) -> None:
    """Check that a step of the optimizer subtracts the gradients unchanged.

    Raises:
        ValueError: the optimizer is not `SGD` with lr=1 and without momentum, weight decay or
            maximize.
    """
    plain = {"lr": 1, "momentum": 0, "weight_decay": 0, "maximize": False}
    for group in optimizer.param_groups:
        choices = {name: group.get(name) for name in plain}
        if type(optimizer) is not torch.optim.SGD or choices != plain:
            numbers = ", ".join(
                f"{n}={v:g}" for n, v in choices.items() if v not in (None, plain[n])
            )
            raise ValueError(
                f"optimizer={type(optimizer).__name__}({numbers}) must be SGD(lr=1, momentum=0, "
                f"weight_decay=0): grafting=QuadraticModel() sets the length and momentum of a step"
            )


def groups_of(layers: Iterable[Layer], optimizer: Optimizer) -> dict[str, list[int]]:
    """Return the indices of the parameter groups that contain each layer's weight and bias.

    Raises:
        ValueError: a weight or bias is not in any group.
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
                f"layer {layer.name!r} is covered, but the optimizer lacks some of its parameters; "
                f"add them to the optimizer, or train the layer first-order with "
                f"{skipping([layer.path])}"
            )
        groups[layer.name] = [group_of[id(parameter)] for parameter in layer.parameters]
    return groups


def report_uncovered(
    model: nn.Module,
    layers: Iterable[Layer],
    uncovered: Iterable[Other],
    optimizer: Optimizer,
    offers: Iterable[str] = (),
) -> None:
    """Log which parameters K-FAC does not cover, how to cover some, and which no step changes.

    Log warnings if K-FAC covers less than half of the weights or could cover more, or if the
    optimizer lacks trained parameters.
    """
    parameters = [tensor for tensor in uncovered if tensor.parameters]
    covered = sum(p.numel() for layer in layers for p in layer.parameters)
    total = covered + sum(p.numel() for tensor in parameters for p in tensor.parameters)
    few = 2 * covered < total
    if few:
        log.warning(
            "K-FAC covers %d of %d weights; the rest is trained first-order", covered, total
        )
    stepped = members(optimizer)
    alone = [block for block in parameters if block.tensor in stepped]
    if words := in_words(model, [block.name for block in alone if not block.ties]):
        level = logging.WARNING if few else logging.INFO
        log.log(level, "trained first-order, because no layer covers them: %s", words)
    if ties := "; ".join(" = ".join(block.ties) for block in alone if block.ties):
        log.info(
            "trained first-order, because no layer covers all modules that share them: %s", ties
        )
    for offer in offers:
        log.warning("%s", offer)
    left = ", ".join(block.name for block in parameters if block.tensor not in stepped)
    if left:
        log.warning(
            "the optimizer does not contain %s: no step changes them, but their gradients are "
            "averaged over ranks, so another optimizer can use them",
            left,
        )


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _tensors(block: Block) -> Sequence[Tensor]:
    return block.parameters if isinstance(block, Layer) else [block.tensor]
