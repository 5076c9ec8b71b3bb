"""Split the layers of a model over groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from mpikfac.comm import Comm, Group, agree
from mpikfac.lab.tensor_parallel.forward import SplitForward, split_forward
from mpikfac.lab.tensor_parallel.rows import layers_before, refusal
from mpikfac.layers import trainer_of
from mpikfac.plan import CHANNELS, Channels, Place, Sliced, Split, TensorParallelPlan
from mpikfac.trace import Trace


class Block(Protocol):
    """A block of gradients: a covered layer or an uncovered parameter."""

    name: str
    parameters: Any


class SplitLayers:
    """The split layers of a model.

    Attributes:
        tp_plan: the split layers, and which of their channels are split.
        places: for each split layer, by name, whether its inputs and outputs are slices.
        trace: the seconds and bytes of exchanged activations.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, tp_plan: TensorParallelPlan, trace: Trace
    ) -> None:
        self.model, self.tp_plan, self.trace = model, tp_plan, trace
        self.places = _places(model, tp_plan)
        color = tp_plan.group(comm.rank, comm.size)[0]
        self._group = Group(comm, color, trace)
        for name, place in self.places.items():
            module: Any = model.get_submodule(name)
            module.forward = SplitForward(
                name, module, self._group, place, tp_plan, comm.size, split_of
            )

    def detach(self) -> None:
        """Restore the original layers.

        Collective over: world.
        """
        for name in self.places:
            vars(self.model.get_submodule(name)).pop("forward", None)
        self._group.free()


def split_layers(
    model: nn.Module, comm: Comm, tp_plan: TensorParallelPlan, trace: Trace | None = None
) -> SplitLayers:
    """Split layers over groups of ranks, before creating a trainer for the model.

    A rank computes a slice of a split layer's channels for all examples of its group. Other modules
    receive the rank's examples with all channels. If two split layers follow each other in a
    `Sequential`, and all modules between them act on each channel separately, the first passes its
    slices on to the second.

    Collective over: comm.

    Args:
        trace: times the exchanges; pass the same trace to the trainer to collect all times in one.

    Raises:
        ValueError: a layer cannot be split; raised before any communication.
        UserError: ranks disagree on `tp_plan`.
    """
    tp_plan.check_ranks(comm.size)
    check_layers(model, tp_plan)
    agree(comm, {"tp_plan": tp_plan})
    return SplitLayers(model, comm, tp_plan, trace or Trace())


def check_layers(model: nn.Module, tp_plan: TensorParallelPlan) -> None:
    """Check that all layers of the plan can be split.

    Raises:
        ValueError: a layer cannot be split, or the model is compiled or already has a trainer or
            split layers.
    """
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError("the model is compiled; split its layers before torch.compile")
    if any(split_forward(module) for module in model.modules()):
        raise ValueError("the model already has split layers; detach() them first")
    if (trainer := trainer_of(model)) is not None:
        kind = type(trainer).__name__
        raise ValueError(f"the model already has a {kind}; split layers before creating {kind}")
    for name, axis in tp_plan.layers.items():
        if why := refusal(model, name):
            raise ValueError(f"layer {name!r}: {why}")
        weight: Any = model.get_submodule(name).weight
        count = weight.shape[CHANNELS.index(axis)]
        if count % tp_plan.tp_size:
            raise ValueError(
                f"layer {name!r} has {count} {axis}, which tp_size={tp_plan.tp_size} does not "
                f"divide"
            )
    for name, place in _places(model, tp_plan).items():
        weight = model.get_submodule(name).weight
        count = weight.shape[0]
        if place.gives and count % tp_plan.tp_size:
            raise ValueError(
                f"layer {name!r} passes {count} outputs on to a split layer, which "
                f"tp_size={tp_plan.tp_size} does not divide; leave one of the two layers out"
            )


def _places(model: nn.Module, tp_plan: TensorParallelPlan) -> dict[str, Place]:
    """Return the place of each split layer; the first of two consecutive ones passes slices on."""
    before, axes = layers_before(model), tp_plan.layers
    takes = {name: before.get(name) for name in axes if before.get(name) in axes}
    gives = set(takes.values())
    return {name: Place(axis, name in takes, name in gives) for name, axis in axes.items()}


# -- for trainers ----------------------------------------------------------------------------------


def split_of(model: nn.Module, blocks: Iterable[Block], ranks: int) -> Split:
    """Return what a plan needs to know about a model's split layers.

    Args:
        blocks: the blocks of the model's gradients.
        ranks: the number of ranks that average gradients.

    Raises:
        ValueError: the layers are split over a number of ranks other than `ranks`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    block_of = {id(p): block.name for block in blocks for p in block.parameters}
    slices, handed_on, tp_plan = [], [], TensorParallelPlan()
    for name, module in model.named_modules():
        forward = split_forward(module)
        if forward is None:
            continue
        if forward.ranks != ranks:
            raise ValueError(
                f"layers are split over {forward.ranks} ranks, but {ranks} ranks average "
                f"gradients: pass the trainer's communicator to split_layers"
            )
        tp_plan = forward.tp_plan
        handed_on += [name] if forward.place.gives else []
        for parameter, dim in _cuts(module, forward.place.axis):
            if id(parameter) in block_of:
                shape, block = tuple(parameter.shape), block_of[id(parameter)]
                slices.append(Sliced(names[id(parameter)], block, shape, dim))
    return Split(tp_plan, tuple(slices), tuple(handed_on))


def _cuts(module: Any, axis: Channels | None) -> list[tuple[Tensor, int]]:
    """Return the weight and bias, each with its split dimension; biases are split by outputs."""
    dim = 0 if axis is None else CHANNELS.index(axis)
    return [(p, d) for p, d in ((module.weight, dim), (module.bias, 0)) if p is not None]
