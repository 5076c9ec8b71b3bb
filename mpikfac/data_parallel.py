"""Data parallelism: ranks start from one model, average gradients, and step it alike."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpikfac
from mpikfac.arena import Arena, Parts
from mpikfac.comm import SUMMABLE, Grid, agree, broadcast, together
from mpikfac.layers import Layer, Other, Statistic, Votes, uncovered
from mpikfac.plan import Plan, Strategy, make_plan
from mpikfac.trace import Trace
from mpikfac.troubles import Troubles, all_finite, not_finite

Block = Layer | Other


class Gradients:
    """A model's gradients in one arena, from local to averaged to a step of the optimizer.

    Running statistics travel with them, so that ranks stay equal in BatchNorm's too.

    Attributes:
        broken: names of blocks whose average is not finite, of those that this rank steps; they
            are left as they are.
    """

    def __init__(self, blocks: Sequence[Block], plan: Plan, grid: Grid) -> None:
        self.blocks = blocks
        self.plan = plan
        self.grid = grid
        self.broken: Collection[str] = ()
        dtype, device = common_type(blocks)
        self.arena = Arena(plan.gradients(), dtype, device)
        self.parts = Parts(self.arena, plan.parts_per_rank)
        self.keep()

    def keep(self) -> None:
        """Makes the present running statistics those that `discard` goes back to."""
        for block in self.blocks:
            if isinstance(block, Statistic):
                block.keep()

    def discard(self) -> None:
        """Takes running statistics back to those after the last step."""
        for block in self.blocks:
            if isinstance(block, Statistic):
                block.leave()

    def read(self) -> None:
        """Copies the model's gradients into the arena."""
        with self.grid.trace.stage("read gradients"):
            for block in self.blocks:
                block.read_gradient(self.arena[block.name])

    def collect(self) -> None:
        """Keeps the gradients of one part of this rank's share, and makes room for the next."""
        self.read()
        self.parts.add()
        self.discard()

    def reduce(self) -> None:
        """Averages the arena over ranks: everywhere, or each block on the rank that steps it.

        Collective over: world.

        Raises:
            ValueError: parts of the batch are missing.
        """
        if self.parts:
            self.grid.sum_in_order(self.parts.take(), self.arena.flat, "reduce gradients")
            self.arena.flat /= len(self.parts) * self.plan.ranks
            return
        self.arena.flat /= self.plan.ranks
        if self.owner_updates:
            bounds = self.arena.layout.bounds
            self.grid.sum_to_owners(self.arena.flat, bounds, "reduce gradients")
        else:
            self.grid.sum_everywhere(self.arena.flat, "reduce gradients")

    def check(self, troubles: Troubles, step: int) -> None:
        """Finds out what is `broken`; a rank's NaN is in the sum, so no message is needed.

        Raises:
            UserError: for too many steps in a row.
        """
        self.broken = ()
        if not all_finite(self.arena.flat):
            stepped = {b.name: self.arena[b.name] for b in self.blocks if self.steps(b)}
            self.broken = not_finite(stepped)
        rank, updaters = self.grid.world.rank, self.plan.updaters
        mine = [name for name in self.broken if updaters[name] == rank]
        troubles.note("gradient", mine, step, "left as they are in this step")

    def write(self, blocks: Sequence[Block], values: Mapping[str, Tensor]) -> None:
        """Makes `values` the gradients of those of `blocks` that this rank steps."""
        with self.grid.trace.stage("write back"):
            for block in blocks:
                if block.name in self.broken:
                    block.leave()
                elif self.steps(block):
                    block.write_gradient(values[block.name])

    def update(self, optimizer: Optimizer) -> None:
        """Steps the model: on every rank, or each block on its owner, whose values then go to all.

        Other ranks' gradients are dropped, so an optimizer neither steps nor keeps state for them.

        Collective over: world.
        """
        if self.owner_updates:
            for block in self.blocks:
                if not self.steps(block):
                    for parameter in block.parameters:
                        parameter.grad = None
        with self.grid.trace.stage("optimizer"):
            optimizer.step()
        if self.owner_updates:
            self._publish_weights()

    def _publish_weights(self) -> None:
        for block in self.blocks:
            if self.steps(block):
                block.read_values(self.arena[block.name])
        self.grid.gather(self.arena.flat, self.arena.layout.bounds, "world", "publish weights")
        for block in self.blocks:
            if not self.steps(block):
                block.write_values(self.arena[block.name])

    @property
    def owner_updates(self) -> bool:
        """Whether a block is stepped by its owner only."""
        return self.plan.strategy.update == "owner"

    def steps(self, block: Block) -> bool:
        """Whether this rank's optimizer steps `block`."""
        return not self.owner_updates or self.plan.updaters[block.name] == self.grid.world.rank


class DataParallel:
    """First-order training: averages gradients over ranks and steps the optimizer.

    The baseline that K-FAC is compared with; it uses the same arena and collectives.

    Args:
        parts: see `Strategy`.

    Collective over: world. The model becomes rank 0's.

    Raises:
        UserError: ranks disagree on the model.

    Attributes:
        steps: completed steps.
        votes: see `KFAC`.
        troubles: see `KFAC`.
        intact: see `KFAC`.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Any,
        parts: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.trace = trace or Trace()
        self.steps, self.intact = 0, True
        self.troubles = Troubles(comm.rank)
        blocks = uncovered(model)
        dtype, device = common_type(blocks)
        blocks.append(votes := Votes(dtype, device))
        self.votes = votes.tensor
        shapes = [(block.name, tuple(block.tensor.shape)) for block in blocks]
        strategy = Strategy.mem_opt(parts=parts)
        self.plan = make_plan([], comm.size, strategy, shapes, itemsize=dtype.itemsize)
        agree(comm, describe(model, optimizer) | {"plan": self.plan.digest()})
        broadcast(comm, [*model.parameters(), *model.buffers()])
        self.gradients = Gradients(blocks, self.plan, Grid(comm, 1, self.trace))

    def step(self) -> None:
        """From local gradients to identical new weights on every rank.

        Collective over: world.
        """
        if not self.gradients.parts:
            self.gradients.read()
        self.gradients.reduce()
        self.gradients.check(self.troubles, self.steps)
        self.gradients.write(self.gradients.blocks, self.gradients.arena)
        self.intact = False
        self.gradients.update(self.optimizer)
        self.steps, self.intact = self.steps + 1, True

    def collect(self) -> None:
        """Takes one part of this rank's share of a batch; see `KFAC.collect`."""
        self.gradients.collect()

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, by name: model, optimizer and number of steps."""
        state = model_state(self.model, self.optimizer, self.gradients)
        return state | {"trainer/steps": self.steps}

    def missing(self, names: Collection[str]) -> set[str]:
        """What is not among `names`, of those that the shares of all ranks make up."""
        return missing_state(self.model, names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes from `state` what this rank needs; all of it on all ranks, or nothing.

        Collective over: world.

        Raises:
            UserError: see `KFAC.load_state_dict`.
        """
        with together(self.gradients.grid.world, "loading state"):
            found = needed_state(self.model, self.optimizer, self.gradients, state)
        load_model_state(self.model, self.optimizer, self.gradients, found)
        self.steps, self.intact = int(found["trainer/steps"]), True


def common_type(blocks: Sequence[Block]) -> tuple[torch.dtype, torch.device]:
    """The dtype and device that all blocks share.

    Raises:
        ValueError: nothing is trained, or a tensor that differs from the first.
    """
    tensors = [(block.name, tensor) for block in blocks for tensor in _tensors(block)]
    if not tensors:
        raise ValueError("the model has no parameter that requires a gradient")
    name, first = tensors[0]
    if first.dtype not in SUMMABLE:
        allowed = " or ".join(map(str, SUMMABLE))
        raise ValueError(f"{name} is {first.dtype}; parameters must be {allowed}")
    for other, tensor in tensors:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{other} is {tensor.dtype} on {tensor.device} but {name} is {first.dtype} on "
                f"{first.device}; all trained parameters and buffers must share both"
            )
    return first.dtype, first.device


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """What ranks that train together must share: versions, model and optimizer, in short."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    groups = [
        [names.get(id(p), "a parameter of another model") for p in group["params"]]
        for group in optimizer.param_groups
    ]
    numbers = dict(_group_settings(optimizer))
    return {
        "mpikfac version": mpikfac.__version__,
        "torch version": torch.__version__,
        "model": _digest(shapes),
        "optimizer": f"{type(optimizer).__name__} {numbers}",
        "optimizer's parameters": _digest(groups),
    }


def model_state(model: nn.Module, optimizer: Optimizer, gradients: Gradients) -> dict[str, Any]:
    """Model and optimizer by name; of the optimizer's tensors those of blocks this rank steps."""
    state: dict[str, Any] = {f"model/{name}": value for name, value in _tensors_of(model)}
    state |= {f"optimizer/groups/{name}": value for name, value in _group_settings(optimizer)}
    for name, parameter in _stepped(model, gradients):
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
    model: nn.Module, optimizer: Optimizer, gradients: Gradients, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The number of steps, and what `load_model_state` takes from `state`.

    Raises:
        ValueError: an item is missing, or not like the one that it is for.
    """
    like: dict[str, Any] = {f"model/{name}": value for name, value in _tensors_of(model)}
    settings = {f"optimizer/groups/{name}": value for name, value in _group_settings(optimizer)}
    like |= {name: value for name, value in settings.items() if name in state}
    found = fitting(state, like | {"trainer/steps": 0})
    # Optimizers give it shapes of their own, and make it at a parameter's first step.
    kept = tuple(f"optimizer/state/{name}/" for name, _ in _stepped(model, gradients))
    return found | {name: state[name] for name in state if name.startswith(kept)}


def fitting(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The items that `like` names, of the same dtype and shape, or numbers where it has numbers.

    Raises:
        ValueError: the first that is missing or another; its name, what is expected, what is there.
    """
    found = {}
    for name, expected in like.items():
        if name not in state:
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is missing")
        found[name] = state[name]
        if (form := _form(found[name])) != _form(expected):
            raise ValueError(f"item {name!r} must be {_form(expected)}; it is {form}")
    return found


def _form(value: object) -> str:
    if torch.is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def load_model_state(
    model: nn.Module, optimizer: Optimizer, gradients: Gradients, state: Mapping[str, Any]
) -> None:
    """The inverse of `model_state`, at any number of ranks and any strategy."""
    found = {name: state[f"model/{name}"] for name, _ in _tensors_of(model)}
    model.load_state_dict(found, strict=False)
    for name, number in _group_settings(optimizer):
        index, key = name.split("/")
        restored = state.get(f"optimizer/groups/{name}", number)
        flag = isinstance(number, bool)
        optimizer.param_groups[int(index)][key] = bool(restored) if flag else restored
    optimizer.state.clear()
    for name, parameter in _stepped(model, gradients):
        prefix = f"optimizer/state/{name}/"
        for key in (key for key in state if key.startswith(prefix)):
            value = state[key]
            if torch.is_tensor(value):  # a count of steps stays where it is read: on the host
                value = value.to(parameter.device if value.dim() else value.device, copy=True)
            optimizer.state[parameter][key.removeprefix(prefix)] = value
    gradients.keep()


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, value) for n, value in model.state_dict().items() if torch.is_tensor(value)]


def _group_settings(optimizer: Optimizer) -> Iterator[tuple[str, int | float]]:
    """Index and key ("0/lr") and value of every number in the parameter groups."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, (int, float)):
                yield f"{index}/{key}", value


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _tensors(block: Block) -> Sequence[Tensor]:
    return block.parameters if isinstance(block, Layer) else [block.tensor]


def _stepped(model: nn.Module, gradients: Gradients) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters whose optimizer state this rank keeps."""
    mine = {id(p) for block in gradients.blocks if gradients.steps(block) for p in block.parameters}
    for name, parameter in model.named_parameters():
        if id(parameter) in mine:
            yield name, parameter
