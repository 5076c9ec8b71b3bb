"""Codistillation: groups of ranks train separate models that learn from each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.comm import Comm, Grid, SplitComm, agree, broadcast, together
from mpikfac.errors import UserError
from mpikfac.layers import find_uncovered
from mpikfac.model import common_type, fitting
from mpikfac.numerics import Arena, all_finite, copy_all
from mpikfac.plan import check_count, check_divides, check_size, gathers, lay_out, names
from mpikfac.trace import Trace

# Names of the items in the state that `state_dict` returns.
STEPS = "codistillation/steps"
PEERS = "codistillation/peers/"


class Codistillation:
    """Train one model per group of ranks; each model also learns from its peers' predictions.

    The peers of a group are the other groups. Each rank keeps a copy of each peer's model, which
    is only updated when weights are swapped [Anil et al. 2018].

        codistillation = mpikfac.lab.Codistillation(model, comm, burn_in=500)
        trainer = mpikfac.FirstOrderTrainer(model, optimizer, codistillation.group)  # or KFAC
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = model(images)
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            (loss + codistillation.term(images, outputs)).backward()
            trainer.step()
            codistillation.end_step()

    Consecutive ranks form a group. All groups must take the same number of steps. The copies of the
    peers' models predict in eval() mode: normalisation layers use the peer's running statistics,
    and there is no dropout.

    Collective over: comm. All ranks of a group get the model of its first rank.

    Args:
        model: returns logits `[batch, classes, *positions]`. All groups use the same architecture,
            but should initialise their models with different seeds.
        burn_in: the number of steps at the start in which groups train independently.
        groups: the number of groups, which must divide the number of ranks; 1 for plain training.
        every: the number of steps between two swaps of weights.
        weight: the coefficient of the loss term that depends on the peers' predictions; if 0,
            groups train independently.
        trace: times the stages; None for a new trace.

    Raises:
        ValueError: an argument is invalid; raised before any communication.
        UserError: ranks disagree on an argument or on the model's shapes.

    Attributes:
        group: the communicator of the rank's group, for `FirstOrderTrainer` and `KFAC`.
        number: the index of the rank's group.
        peers: copies of the models of the other groups, as of the last swap.
        steps: the number of completed steps.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        *,
        burn_in: int,
        groups: int = 2,
        every: int = 50,
        weight: float = 1.0,
        trace: Trace | None = None,
    ) -> None:
        comm = SplitComm(comm).trains
        burn_in, groups = check_count("burn_in", burn_in, 0), check_count("groups", groups, 1)
        check_divides("groups", groups, comm.size)
        every, weight = check_count("every", every, 1), check_size("weight", weight)
        self.model, self.burn_in, self.every, self.weight = model, burn_in, every, weight
        self.steps, self.trace = 0, trace or Trace()
        self._shapes = shapes_of(model)
        dtype, device = common_type(find_uncovered(model))
        numbers = {"burn_in": burn_in, "groups": groups, "every": every, "weight": weight}
        form = {f"the shape of {name}": shape for name, shape in self._shapes.items()}
        agree(comm, {**numbers, "dtype": dtype, **form})
        self._grid = Grid(comm, groups, self.trace)
        self.group, self.number = self._grid.row, self._grid.column.rank
        broadcast(self.group, [*model.parameters(), *model.buffers()])
        segments = [[(f"{g}/{n}", s) for n, s in self._shapes.items()] for g in range(groups)]
        layout = lay_out(segments)  # one segment per group
        self._arena = Arena(layout, dtype, device)
        of_all = layout, lambda _: True, self.number, groups, dtype.itemsize
        self._messages = gathers(names.EXCHANGE_WEIGHTS, "column", *of_all)
        others = [number for number in range(groups) if number != self.number]
        self.peers = {number: copied(model) for number in others}
        self._swap_if_due()

    @property
    def learning(self) -> bool:
        """Whether the loss of the next step includes the term from the peers' predictions."""
        return self._learns_after(self.steps)

    def _learns_after(self, steps: int) -> bool:
        return bool(self.peers and self.weight) and steps >= self.burn_in

    def term(self, inputs: Tensor | tuple[Any, ...], outputs: Tensor) -> Tensor:
        """Return the scalar term to add to a batch's mean loss.

        The term is `weight` times `KL(mean of the peers' predictions, own predictions)`, averaged
        over batch and positions; it is 0 during the burn-in.

        Collective over: none.

        Args:
            inputs: the argument of the model, or a tuple of arguments.
            outputs: the logits that the model returned for `inputs`.

        Raises:
            ValueError: the outputs do not have at least two classes.
        """
        if outputs.dim() < 2 or outputs.shape[1] < 2:
            raise ValueError(
                f"term() needs logits [batch, classes, ...] with at least 2 classes, not "
                f"{list(outputs.shape)}"
            )
        if not self.learning:
            return outputs.new_zeros(())
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        with self.trace.stage(names.PREDICTIONS_OF_PEERS), torch.no_grad():
            predictions = [peer(*arguments).softmax(1) for peer in self.peers.values()]
        return self.weight * divergence(predictions, outputs)

    def end_step(self) -> None:
        """End the step; swap weights between groups if a swap is due.

        Collective over: world if a swap is due, else none.

        Raises:
            UserError: the weights of a group are not finite.
            ValueError: the model's parameters or buffers have changed.
        """
        self.steps += 1
        self._swap_if_due()

    def _swap_if_due(self) -> None:
        """Send the group's weights to all groups, every `every` steps after the burn-in."""
        if not self.learning or (self.steps - self.burn_in) % self.every:
            return
        if shapes_of(self.model) != self._shapes:
            raise ValueError(
                "the model's parameters or buffers have changed; construct Codistillation again"
            )
        copy_all(self._places(self.number, self.model))
        self._grid.exchange(self._messages, self._arena.flat)
        for number in range(len(self.peers) + 1):
            if not all_finite(self._arena.segment(number)):
                raise UserError(
                    f"the weights of group {number} are not finite; try a smaller learning rate"
                )
        self._hand_out()

    def _places(self, number: int, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs: a group's tensor in the arena, and the model's tensor of the same name."""
        for name, tensor in real_tensors(model):
            yield self._arena[f"{number}/{name}"], tensor

    def _hand_out(self) -> None:
        """Copy the weights from the arena to the copies of the peers' models."""
        for number, peer in self.peers.items():
            copy_all((tensor, place) for place, tensor in self._places(number, peer))

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the step count and the peers' weights by name, for the group's checkpoint.

        The result is the same on all ranks of a group. The complete state of a group is
        `trainer.state_dict() | codistillation.state_dict()`; a run that loads the states of all
        groups continues as if it had not been interrupted.

        Collective over: none.
        """
        return {STEPS: self.steps} | (self._of_peers() if self.learning else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the rank's group, even if another number of ranks saved it.

        If loading fails on any rank, no rank's state changes.

        Collective over: world.

        Raises:
            UserError: on some rank, an item is missing or does not match the model; or groups have
                taken different numbers of steps.
        """
        with together(self._grid.world, "loading state", untrusted=True):
            steps = fitting(state, {STEPS: 0})[STEPS]
            check_count(f"item {STEPS!r}", steps, 0)
            needed = self._of_peers() if self._learns_after(steps) else {}
            items = fitting(state, needed, rounded=True)
        agree(self._grid.world, {STEPS: steps})
        copy_all((place, items[name]) for name, place in needed.items())
        self._hand_out()
        self.steps = steps

    def _of_peers(self) -> dict[str, Tensor]:
        """Return the weights of the peers, by their names in the state."""
        prefix = f"{self.number}/"
        blocks = self._arena.items()
        return {PEERS + name: block for name, block in blocks if not name.startswith(prefix)}


def real_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's floating-point parameters and buffers, by name: only these are exchanged."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor.detach()


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's floating-point parameters and buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in real_tensors(model)}


def copied(model: nn.Module) -> nn.Module:
    """Return a frozen copy of the model in eval() mode."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def divergence(predictions: Sequence[Tensor], outputs: Tensor) -> Tensor:
    """Return the mean of `KL(mean of predictions, softmax of outputs)` over batch and positions.

    Args:
        predictions: each peer's probabilities, `[batch, classes, *positions]`.
        outputs: logits of the same shape.
    """
    mean = torch.stack(list(predictions)).mean(0)
    each = F.kl_div(outputs.log_softmax(1), mean, reduction="none").sum(1)
    return each.mean()
