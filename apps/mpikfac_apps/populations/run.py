"""The training run of a population: steps of all members, tests, and selections."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

import mpikfac
from mpikfac import files
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.options.documents import nested
from mpikfac_apps.options.fields import flat
from mpikfac_apps.populations import selection
from mpikfac_apps.populations.crew import Crew, State
from mpikfac_apps.populations.member import in_words
from mpikfac_apps.populations.options import PopulationOptions, parse
from mpikfac_apps.programs.run import check_options, of_numbers
from mpikfac_apps.running.loop import Loop
from mpikfac_apps.running.metrics import Meter
from mpikfac_apps.running.start import start
from mpikfac_apps.running.votes import AnyTrainer
from mpikfac_apps.text import key_of
from mpikfac_apps.training.batches import mixed
from mpikfac_apps.training.parts.problem import words_of
from mpikfac_apps.training.testing import best

SELECTION, CHANGE = 2, 3  # mixed into seeds, so that random draws differ by purpose

log = logging.getLogger("mpikfac.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Train a population; return 0, or the option `exit_code` after a request to stop.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """
    return start(
        lambda ranks: parse(argv, ranks),
        lambda options: options.train,
        PopulationRun,
        lambda options: nested(flat(options)),
    )


class PopulationRun(Loop):
    """The training loop of a population.

    Collective over: comm, as are all methods.

    Attributes:
        population: all options, of the training and of the search.
        crew: the members that this rank trains.
    """

    unit = "images"

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        options: PopulationOptions,
        guard: Guard,
        device: torch.device,
    ) -> None:
        self.population, self.crew = options, Crew(comm, options, device)
        first = next(iter(self.crew.members.values()))
        self._total = self.crew.problem.calendar.first(options.train.epochs)
        super().__init__(
            *(comm, options.train, guard, cast(AnyTrainer, self.crew)),
            steps=min(self._total, options.train.max_steps or sys.maxsize),
            meter=Meter(comm, device),
            lr=first.lr,
            rate=options.train.rate,
        )

    def take(self, step: int) -> None:
        """Take a step with each member of this rank."""
        place = self.crew.problem.calendar.place(step)
        batch = self.crew.problem.calendar.at(place[0]).batch
        with self.speed.step(batch * self.population.population.members):
            for taken in self.crew.step(step):
                self.meter.add(*taken)

    def epochs(self, steps: int) -> float:
        """Return the number of epochs after `steps` steps; not collective."""
        return self.crew.problem.calendar.epochs(steps)

    def test_due(self, steps: int) -> bool:
        """Return whether all members are tested after `steps` steps; not collective."""
        return steps % self.population.population.every == 0 or steps == self._total

    def test_after(self, steps: int) -> None:
        """Test all members on held-out images; then select or, at the end, test the best one."""
        results = self.crew.gathered({n: m.fitness() for n, m in self.crew.members.items()})
        numbers = self.crew.gathered({n: m.numbers for n, m in self.crew.members.items()})
        lost = [member for member in results if not math.isfinite(results[member]["loss"])]
        if len(lost) == len(results):
            raise mpikfac.UserError(
                f"no member has a finite loss after step {steps}; try a learning rate below "
                f"lr={self.rate}, or a different damping"
            )
        losses = {m: math.inf if m in lost else result["loss"] for m, result in results.items()}
        ranking = sorted(losses, key=losses.__getitem__)
        leader = ranking[0]
        self.row(lost_members=len(lost), train_loss=self.meter.everything()[0])
        self._tell(steps, leader, results[leader], numbers[leader])
        if steps < self._total:
            self._select(steps, ranking, lost)
        else:
            self._end_with(leader)

    def _tell(
        self, steps: int, leader: int, result: Mapping[str, float], numbers: Mapping[str, float]
    ) -> None:
        """Write a row of metrics and a line of the log about the best member."""
        judged = {f"held_out_{key_of(name)}": value for name, value in result.items()}
        self.row(
            best_member=leader, **judged, **{f"best_{n}": value for n, value in numbers.items()}
        )
        words = words_of(result, self.crew.problem.task.measure)
        log.info(
            "step %d: best is member %d, held-out loss %.4f, %s, %s",
            *(steps, leader, result["loss"], words, in_words(numbers)),
        )

    def _select(self, steps: int, ranking: Sequence[int], lost: Sequence[int]) -> None:
        """Replace members that are lost, worst, or close to a better one, by children of others."""
        search, seed = self.population.population, self.population.train.seed
        gone = set(lost)
        if search.near:
            staying = [member for member in ranking if member not in lost]
            distances = self.crew.distances(sorted(ranking))
            gone |= selection.suppressed(staying, distances, search.near)
        generator = torch.Generator().manual_seed(mixed(seed, SELECTION, steps))
        parents = selection.replacements(ranking, gone, search.worst, search.crossover, generator)
        children = self.crew.members.keys() & parents.keys()
        states = self.crew.states({number for child in children for number in parents[child]})
        for child in sorted(children):
            first, second = (states[parent] for parent in parents[child])
            self._replace(child, first, second, steps)
        pairs = (
            f"{child} by {' and '.join(map(str, sorted({*of})))}" for child, of in parents.items()
        )
        log.info("step %d: replaced %s", steps, ", ".join(pairs))

    def _replace(self, child: int, first: State, second: State, steps: int) -> None:
        """Replace the member `child` with a child of two parents' states.

        Without crossover, both states are the same.
        """
        search, member = self.population.population, self.crew.members[child]
        seed = self.population.train.seed
        generator = torch.Generator().manual_seed(mixed(seed, CHANGE, steps, child))
        state = first
        if search.crossover:
            state = selection.crossed(first, second, member.layers, generator)
        if search.mutation:
            names = [f"model/{name}" for name, _ in member.model.named_parameters()]
            state = selection.mutated(state, names, search.mutation, generator)
        member.load(state)
        member.follow(selection.explored(member.numbers, search.explore, generator))

    def _end_with(self, leader: int) -> None:
        """Test the best member, for the first time on the test set, and save its weights."""
        results = {}
        if leader in self.crew.members:
            model = self.crew.members[leader].model
            results = {leader: self.crew.tests.evaluate(model)}
            if self.crew.leads:
                result = f"the best member on held-out images, {leader}"
                best.keep(model, Path(self.options.run_dir), result)
        tested = self.crew.gathered(results)[leader]
        self.row(**{f"test_{key_of(name)}": value for name, value in tested.items()})
        words = words_of(tested, self.crew.problem.task.measure)
        log.info("member %d: test loss %.4f, %s", leader, tested["loss"], words)

    def summary(self) -> str:
        """Return a line about the networks, ranks and steps; not collective."""
        train, members = self.population.train, self.population.population.members
        every, total = self.population.population.every, self._total
        selection = f"a selection every {every}"
        if every >= total:
            selection = f"no selection: population.every={every} must be less than {total} steps"
        return (
            f"{members} members of {train.model} on {train.data.name} with {train.optimizer}; "
            f"ranks {self.comm.size}, batch {train.batch}, "
            f"steps {self.crew.steps} to {self.steps}, "
            f"{selection}"
        )

    def about(self) -> dict[str, Any]:
        """Return the options on which the results of the run depend."""
        return of_numbers(self.population)

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state` from a checkpoint of a run with the same options."""
        check_options(files.json_of(str(checkpoint["run/data"])), self.about())
        self.crew.load_state_dict(checkpoint)
