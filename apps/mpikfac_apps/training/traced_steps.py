"""Record the stages of some steps of a run, and write them to files after these steps.

RUN/trace.json.gz can be opened in https://ui.perfetto.dev or chrome://tracing; RUN/stages.json
contains the mean time of each stage.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mpikfac
from mpikfac import files
from mpikfac_apps.options.options import Options
from mpikfac_apps.text import table
from mpikfac_apps.training.parts.trainings import Training

WARM_UP = 2  # the first steps are slower, because caches are cold, and are not recorded

log = logging.getLogger("mpikfac.train")


class Recording:
    """Record the stages of `trace_steps` steps, after the first two steps of a start.

    Args:
        last: the number of steps of the whole run.

    Attributes:
        chosen: the steps to record.
    """

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        options: Options,
        training: Training,
        last: int,
    ) -> None:
        self.comm, self.directory = comm, Path(options.run_dir)
        self.training, self.trainer, self.trace = training, training.trainer, training.trainer.trace
        begin, count = self.trainer.steps + WARM_UP, options.trace_steps or 0
        self.chosen = range(begin, min(begin + count, last))
        self._steps: dict[int, tuple[float, float]] = {}
        if count and not self.chosen and comm.rank == 0:
            log.warning("trace_steps=%d: no steps are left after %d warm-up steps", count, WARM_UP)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the stages of the with statement's body if the step is one of `chosen`."""
        if step not in self.chosen:
            yield
            return
        self.trace.record(True)
        start = time.perf_counter()
        yield
        self.trace.record(False)
        self._steps[step] = start, time.perf_counter()

    def write(self) -> None:
        """Write the recorded steps if there are any, after timing their messages in isolation.

        Collective over: world.
        """
        if not self._steps:
            return
        recorded = mpikfac.timeline.Recorded(self._steps, self.training.events())
        self._steps = {}
        ranks = self.comm.gather(recorded.later(mpikfac.comm.clock_offset(self.comm)))
        self.comm.Barrier()
        isolated = self.comm.gather(self._isolated())
        if ranks is not None and isolated is not None:
            self._write(ranks, isolated)

    def _isolated(self) -> dict[str, float]:
        """Return the seconds that a step's messages take in isolation, by stage."""
        grid, device = self.trainer.grid, next(self.trainer.model.parameters()).device
        plan = self.trainer.plan.of(grid.world.rank)
        return mpikfac.comm.isolated_seconds(grid, plan, device)

    def _write(
        self, ranks: list[mpikfac.timeline.Recorded], isolated: list[dict[str, float]]
    ) -> None:
        """Log the tables of stages; write the files unless existing files contain more steps."""
        columns = self.trainer.plan.grid.columns
        means = mpikfac.timeline.stage_means(ranks, columns)
        means["collectives"] = mpikfac.timeline.collective_means(ranks, isolated)
        lines = table(mpikfac.timeline.stage_table(means))
        first, last = means["steps"][0], means["steps"][-1]
        log.info("steps %d to %d, means over ranks, in ms:\n%s", first, last, "\n".join(lines))
        if means["collectives"]:
            lines = table(mpikfac.timeline.collective_table(means["collectives"]))
            log.info("messages of these steps, in ms:\n%s", "\n".join(lines))
        if _steps(self.directory / "stages.json") > len(means["steps"]):
            log.info("stages.json and trace.json.gz are kept, because they contain more steps")
            return
        picture = json.dumps(mpikfac.timeline.chrome_trace(ranks, columns))
        try:
            files.write_text(self.directory / "stages.json", json.dumps(means, indent=1) + "\n")
            files.write_bytes(self.directory / "trace.json.gz", gzip.compress(picture.encode()))
        except OSError as error:
            log.warning("stages.json and trace.json.gz cannot be written: %s", error)


def _steps(path: Path) -> int:
    """Return the number of steps in a stages.json, or 0 if there is no readable file."""
    try:
        return len(files.read_json(path)["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
