"""Methods: what a trainer makes of averaged gradients. The base takes them as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpikfac.comm import SplitComm
from mpikfac.engine.extension import OneModel, exchange_of
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Part
from mpikfac.engine.site import Site
from mpikfac.engine.update import Everyone, update_of
from mpikfac.layers import Layer, Other, find_uncovered
from mpikfac.numerics import Scaler
from mpikfac.plan import Plan, Split, Strategy, plan_for
from mpikfac.settings import Numbers, Schedule


class FirstOrder:
    """The base of all methods on a rank: averaged gradients are the directions of a step.

    Attributes:
        parts: the parts with a state, in the order in which parts forget.
        is_consistent: whether the state of the rank is the state after the last step, without parts
            of a later step.
        outgrown: whether the method has to be built anew, by what it has seen of a batch.
    """

    parts: Sequence[Part] = ()

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.is_consistent = True
        self.outgrown = False

    @property
    def examples(self) -> int:
        """The number of examples in what the method has recorded of the rank's batch."""
        return 0

    def numbers(self, step: int) -> Numbers:
        """Return the numbers in force at a step."""
        return Numbers(step)

    def compared(self, numbers: Numbers) -> dict[str, object]:
        """Return the numbers of a step that have to be equal on all ranks."""
        return {}

    def check_scaled(self) -> None:
        """Return if the method can take a scaled loss.

        Raises:
            ValueError: a choice of the method excludes a scaler.
        """

    def begin_step(self) -> None:
        """Begin the work of a step.

        Raises:
            ValueError: the step lacks a batch that a choice needs.
        """

    def begin(self, step: int) -> None:
        """Begin a step: from here on, the state is the state after `step` steps."""
        self.is_consistent = True

    def collect(self) -> None:
        """Take the passes since the last call as a part of the rank's share of a batch."""

    def learn(self, numbers: Numbers) -> None:
        """Learn from the batch, before gradients are averaged.

        Collective over: world.
        """

    def unscale(self, scaler: Scaler) -> bool:
        """Take the scale of a loss out of what was recorded; return whether all of it is finite."""
        return True

    def direct(self, numbers: Numbers) -> None:
        """Turn averaged gradients into directions, and write them to the model.

        Collective over: world.
        """
        self.gradients.write(self.gradients.slots)
        self.is_consistent = False

    def finish(self) -> None:
        """Finish messages that are under way.

        Collective over: world.
        """

    def gather(self) -> None:
        """Let the ranks that save numbers hold the numbers, as in a restart.

        Collective over: world.
        """

    def recall(self) -> None:
        """Forget what was sent of a batch that no step takes.

        Collective over: world.
        """

    def clear(self) -> None:
        """Forget the passes since the last step."""
        for part in self.parts:
            part.clear()

    def skip(self) -> None:
        """Leave all as before a batch that ranks skip."""
        self.clear()

    def forget(self) -> None:
        """Forget everything."""
        for part in self.parts:
            part.forget()

    def known(self, state: Mapping[str, Any]) -> set[str]:
        """Return the names of the items of a state that the method's parts can take."""
        return set()

    def check_same_model(self) -> None:
        """Return if other parameters of the model may be trained from now on.

        Raises:
            UserError: the method has to be made anew.
        """

    def take_over(self, before: Any) -> None:
        """Take over what fits from the method of the model before a change.

        Collective over: world.
        """

    def detach(self) -> None:
        """Remove the hooks."""

    def close(self) -> None:
        """End what runs beside the steps.

        Collective over: none.
        """


class Method:
    """What a trainer is made of, before and after a change of the trained parameters.

    The base is the method of first-order training.
    """

    momentum: float | Schedule = 0.0
    """The momentum of averaged gradients that the method takes."""

    def cover(self, model: nn.Module) -> tuple[list[Layer], list[Other]]:
        """Return the layers that the method covers, and the uncovered tensors."""
        return [], find_uncovered(model)

    def plan(
        self,
        layers: Sequence[Layer],
        uncovered: Sequence[Other],
        strategy: Strategy,
        ranks: int,
        itemsize: int,
        split: Split,
    ) -> Plan:
        """Return the plan, if all choices fit together.

        Raises:
            ValueError: two choices cannot work together.
        """
        shapes, means = described(uncovered)
        return plan_for([], ranks, strategy, shapes, itemsize=itemsize, means=means, split=split)

    def check(
        self, layers: Iterable[Layer], optimizer: Optimizer, team: SplitComm, plan: Plan
    ) -> None:
        """Return if optimizer and ranks suit the method.

        Raises:
            ValueError: they do not.
        """

    def seen(self, state: Mapping[str, Any]) -> str:
        """Return what the run of a state has seen of a batch, as a text; "" for nothing.

        Raises:
            ValueError: the state has something else in its place.
        """
        return ""

    def adopt(self, seen: str) -> None:
        """Take what a state's run has seen of a batch."""

    def compared(self) -> dict[str, object]:
        """Return the choices that have to be equal on all ranks."""
        return {}

    def build(
        self,
        gradients: Gradients,
        model: nn.Module,
        optimizer: Optimizer,
        team: SplitComm,
        plan: Plan,
    ) -> FirstOrder:
        """Return what takes the steps of the method."""
        return FirstOrder(gradients)

    def exchange(self, site: Site, gradients: Gradients) -> OneModel:
        """Return what ranks exchange beside sums."""
        return exchange_of(site, gradients)

    def update(self, gradients: Gradients, exchange: OneModel) -> Everyone:
        """Return who steps the model."""
        return update_of(gradients)


def described(
    uncovered: Sequence[Other],
) -> tuple[list[tuple[str, tuple[int, ...]]], list[str]]:
    """Return names and shapes of uncovered tensors, and the names of running statistics."""
    shapes = [(block.name, tuple(block.tensor.shape)) for block in uncovered]
    return shapes, [block.name for block in uncovered if not block.parameters]
