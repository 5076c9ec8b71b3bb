"""Run a small training program: read its options, create its `Work`, and take the steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import mpikfac
from mpikfac import files
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.documents import nested
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.work import Work
from mpikfac_apps.running.loop import Loop
from mpikfac_apps.running.metrics import Meter
from mpikfac_apps.running.start import start
from mpikfac_apps.text import key_of
from mpikfac_apps.tracking.tracker import check as check_trackers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound=ProgramOptions)
Make = Callable[[mpikfac.comm.Comm, Options, torch.device], Work]

log = logging.getLogger("mpikfac.train")


def main(
    program: str, group: type[Options], make: Make[Options], argv: Sequence[str] | None = None
) -> int:
    """Train, and print a line after each epoch; return 0, or the option `exit_code` after a stop.

    Collective over: world.

    Args:
        program: the name of the program, such as mpikfac train-detection.
        group: the dataclass of the program's options.
        make: creates the program's `Work` on every rank; collective. A `ValueError` on a single
            rank must be raised inside `mpikfac.comm.together`.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """

    def loop(
        comm: mpikfac.comm.Comm, options: Options, guard: Guard, device: torch.device
    ) -> ProgramRun:
        torch.manual_seed(options.seed)
        return ProgramRun(comm, options, guard, make(comm, options, device), device)

    def config(options: Options) -> dict[str, Any]:
        return nested(flat(options) | {"lr": options.rate})

    def parse(_: int) -> Options:
        options = CommandLine(program, group).read(argv)
        check_trackers(options.trackers)
        return options

    return start(parse, lambda options: options, loop, config)


class ProgramRun(Loop):
    """The training loop of a small program, which takes the steps of a `Work`.

    Collective over: comm, as are all methods.
    """

    options: ProgramOptions

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        options: ProgramOptions,
        guard: Guard,
        work: Work,
        device: torch.device,
    ) -> None:
        self.work = work
        steps = options.epochs * work.steps_per_epoch
        super().__init__(
            *(comm, options, guard, work.trainer),
            steps=min(steps, options.max_steps or sys.maxsize),
            meter=Meter(comm, device, measures=len(work.measures)),
            lr=lambda step: options.rate_of(step, steps),
            rate=options.rate,
        )

    def take(self, step: int) -> None:
        """Take a step of the program's `Work`."""
        self.set_rate(step)
        with self.speed.step(self.work.examples_per_step):
            loss, examples, sums = self.work.step(step)
        self.meter.add(loss, sums, examples)
        self.votes.note(loss)

    def epochs(self, steps: int) -> float:
        """Return the number of epochs after `steps` steps; not collective."""
        return steps / self.work.steps_per_epoch

    def test_due(self, steps: int) -> bool:
        """Return whether an epoch ends after `steps` steps; not collective."""
        return steps % self.work.steps_per_epoch == 0

    def test_after(self, steps: int) -> None:
        """Test the network after an epoch, and write the results to metrics.jsonl and the log."""
        loss, *means = self.meter.everything()
        trained = dict(zip(self.work.measures, means))
        tests = self.work.test()
        rows = {f"train_{key_of(name)}": value for name, value in trained.items()}
        rows |= {f"test_{key_of(name)}": value for name, value in tests.items()}
        self.row(train_loss=loss, **rows)
        words = [f"loss {loss:.4f}", *(f"{name} {value:.4f}" for name, value in trained.items())]
        words += [f"test {name} {value:.4f}" for name, value in tests.items()]
        epoch = steps // self.work.steps_per_epoch
        log.info("epoch %d: %s, %.1f s", epoch, ", ".join(words), self.speed.seconds)

    def summary(self) -> str:
        """Return a line about the network, the data, the ranks and the steps; not collective."""
        return (
            f"{self.work.summary()} with {self.options.optimizer}; ranks {self.comm.size}, "
            f"steps {self.trainer.steps} to {self.steps}, {self.work.steps_per_epoch} per epoch"
        )

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the state of the program's `Work`."""
        return self.work.state()

    def about(self) -> dict[str, Any]:
        """Return the options on which the results of the run depend."""
        return of_numbers(self.options)

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state` from a checkpoint of a run with the same options."""
        check_options(files.json_of(str(checkpoint["run/data"])), of_numbers(self.options))
        self.work.load(checkpoint)


def of_numbers(options: DataclassInstance) -> dict[str, Any]:
    """Return the options on which results depend: all except those in `RunOptions`."""
    of_a_start = RunOptions.__dataclass_fields__
    return {key: value for key, value in flat(options).items() if key not in of_a_start}


def check_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a resumed run has the same options as the run that wrote the checkpoint.

    Raises:
        ValueError: an option differs.
    """
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f"the checkpoint belongs to a run with {name}={before.get(name)}, not {value}; "
                f"use the same value, or another run_dir"
            )
