"""The members of a population that a rank trains; the training loop sees them as one trainer."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.populations import selection
from mpikfac_apps.populations.member import Member, in_words, searched
from mpikfac_apps.populations.options import PopulationOptions
from mpikfac_apps.problems.datasets import Dataset
from mpikfac_apps.training.batches import Batches, mixed, share
from mpikfac_apps.training.parts.problem import Problem, load_data

FIRST_NUMBERS = 1  # mixed into the seed, so that random draws differ by purpose

State = dict[str, Any]

log = logging.getLogger("mpikfac.train")


class Untroubled:
    """Count no non-finite values, because a member that diverges is replaced."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


class Crew:
    """The members of a population that a rank trains, one after another.

    Collective over: comm, unless a docstring says otherwise.

    Args:
        comm: a communicator of the ranks of all members.

    Attributes:
        problem: the data, loss and test of the members; the test uses the held-out images.
        tests: the same problem, tested on the test set of the data set.
        members: the members that this rank trains, by number.
        leads: whether this rank is the first of the ranks that train the same members.
        votes, steps, combined, nonfinite, trace: the attributes of a trainer that the loop uses,
            for all members together.
    """

    combined = True

    def __init__(
        self, comm: mpikfac.comm.Comm, options: PopulationOptions, device: torch.device
    ) -> None:
        self.comm, self.steps = comm, 0
        count, seed = options.population.members, options.train.seed
        groups = min(comm.size, count)
        number = comm.rank * groups // comm.size
        self.group = cast(mpikfac.comm.Comm, comm.Split(number, comm.rank))
        self.leads = self.group.rank == 0
        self.problem, self.tests = divided(self.group, options, device)
        self.trace, self.nonfinite = mpikfac.Trace(), Untroubled()
        self.votes = torch.zeros(16, dtype=torch.float64)
        numbers = searched(options)
        self.members = {}
        for member in range(number, count, groups):
            generator = torch.Generator().manual_seed(mixed(seed, FIRST_NUMBERS, member))
            first = selection.first_numbers(numbers, options.population.spread, generator)
            first = first if member else numbers
            log.info("member %d starts with %s", member, in_words(first))
            self.members[member] = Member(self.problem, member, first, self.trace)

    def step(self, step: int) -> list[tuple[Tensor, Tensor, int]]:
        """Take a step with each member of this rank.

        Return, for each member, the loss, the metric summed over images, and the number of images.
        """
        images, labels = self.problem.batches.get(*self.problem.calendar.place(step))
        taken = [(*m.step(step, images, labels), len(images)) for m in self.members.values()]
        self.steps += 1
        sums = mpikfac.comm.summed(self.comm, self.votes.tolist())
        self.votes.copy_(torch.tensor(sums) / self.comm.size)
        return taken

    def gathered(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Gather the values of all members, by number; each rank passes those of its members."""
        every = self.comm.allgather(values if self.leads else {})
        return dict(sorted(item for part in every for item in part.items()))

    def states(self, wanted: Collection[int]) -> dict[int, State]:
        """Return the states of the `wanted` members, received from the ranks that train them."""
        asked = set().union(*self.comm.allgather(set(wanted)))
        held = {m: member.state() for m, member in self.members.items() if m in asked}
        return self.handed(held, wanted)

    def handed(self, held: Mapping[int, State], wanted: Collection[int]) -> dict[int, State]:
        """Return the items of the `wanted` members, received from the ranks that hold them.

        Args:
            held: the items that this rank holds, by member and name.
        """
        items = {f"{m}/{name}": value for m, state in held.items() for name, value in state.items()}
        names = sorted(set().union(*self.comm.allgather(set(items))))
        needed = [name for name in names if int(name.partition("/")[0]) in wanted]
        received = mpikfac.comm.handed_over(self.comm, items, needed)
        states: dict[int, State] = {member: {} for member in wanted}
        for name, value in received.items():
            member, _, item = name.partition("/")
            states[int(member)][item] = value
        return states

    def distances(self, members: Sequence[int]) -> Tensor:
        """Return the distances between the weights of members, `[members, members]`."""
        held = {m: {"weights": member.weights()} for m, member in self.members.items()}
        vectors = self.handed(held, members)
        return selection.distances_of([vectors[member]["weights"] for member in members])

    # -- what a loop needs from a trainer --------------------------------------------------------

    def average_replicas(self) -> None:
        """Do nothing, because each member is a single model; not collective."""

    def close(self) -> None:
        """Close the trainers of the members."""
        for member in self.members.values():
            member.trainer.close()

    def state_dict(self) -> State:
        """Return this rank's part of the states of its members; not collective."""
        states = {m: member.state() for m, member in self.members.items()}
        items = {
            f"member-{m}/{n}": value for m, state in states.items() for n, value in state.items()
        }
        return items | {"trainer/steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` from a checkpoint, on any number of ranks.

        Raises:
            UserError: an item is missing or invalid.
        """
        for number, member in self.members.items():
            prefix = f"member-{number}/"
            names = [name for name in state if name.startswith(prefix)]
            member.load({name.removeprefix(prefix): state[name] for name in names})
        self.steps = state["trainer/steps"]


def divided(
    comm: mpikfac.comm.Comm, options: PopulationOptions, device: torch.device
) -> tuple[Problem, Problem]:
    """Return two problems of training on the images that are not held out, with different tests.

    The first problem is tested on the held-out images, and the second one on the data set's test
    images.

    Collective over: comm.

    Raises:
        UserError: no training image is left.
    """
    train, count = options.train, options.population.held_out
    data = load_data(comm, train)
    assert isinstance(data, Dataset), "the options are checked"
    left = len(data.train_images) - count
    with mpikfac.comm.together(comm, "options"):
        if left < 1:
            raise ValueError(
                f"population.held_out={count} must be less than the {len(data.train_images)} "
                f"training images"
            )
    of_members = dataclasses.replace(train.data, train_images=left)
    tested = Problem(comm, dataclasses.replace(train, data=of_members), device)
    assert isinstance(tested.batches, Batches), "images in memory"
    judged, batches = copy.copy(tested), copy.copy(tested.batches)
    held_out = data.train_images[left:], data.train_labels[left:]
    images, labels = share(*held_out, comm.rank, comm.size)
    batches.tested = images.to(device), labels.to(device)
    judged.batches = batches
    return judged, tested
