"""Read the measurements of a study's cells from their files, and compute the planned bytes.

The run directory can be missing, or belong to an interrupted run. Values whose file is missing are
None or empty.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac.plan import names
from mpikfac_apps.lab.study import curves, jobs
from mpikfac_apps.lab.study.curves import Curve
from mpikfac_apps.lab.study.spec import STOPPED, Cell, Study, inv_update_steps
from mpikfac_apps.options.fields import flat, leaves
from mpikfac_apps.options.options import JOINTS, Options, StrategyOptions
from mpikfac_apps.options.strategy import make_strategy, training_ranks
from mpikfac_apps.planning.facts import looked_at

GROUPS = {
    "forward": (names.FORWARD,),
    "backward": (names.BACKWARD,),
    "statistics": (names.STATISTICS,),
    "factor messages": (names.REDUCE_SCALES, names.REDUCE_STATISTICS),
    "decomposition": (names.DECOMPOSE,),
    "basis messages": (names.SEND_FACTORS, names.RECEIVE_BASES, names.PUBLISH_BASES),
    "preconditioning": (names.PRECONDITION,),
    "gradient messages": (
        names.REDUCE_GRADIENTS,
        names.GATHER_GRADIENTS,
        names.PUBLISH_DIRECTIONS,
        names.SCATTER_DIRECTIONS,
        names.PUBLISH_WEIGHTS,
        names.CLIP,
    ),
    "optimizer": (names.OPTIMIZER,),
}
"""The stages of a step in each group of a report; all other stages are in the group "other"."""
WAITING, OTHER = "waiting", "other"
BUSY = 0.1
"""The fraction of the cores that other work can use before a cell's times are unreliable."""
# Options and choices about devices, transport and records change results only by rounding. All
# options outside the sets below change results.
WRITTEN = {
    *("seed", "run_dir", "resume", "checkpoint_minutes", "checkpoint_every", "max_time"),
    *("exit_code", "watchdog_timeout", "shrink", "log_every", "trace_steps", "threads", "metrics"),
    *("eval_every", "keep_best", "data.cache"),
}
# Options that make up a strategy: `_numbers` uses the strategy instead.
RESOLVED = {
    *(leaf.key for leaf in leaves(StrategyOptions)),
    *("kfac.preconditioner.type", "kfac.inv_update_steps"),
}


STAGE = {"seconds": float, "bytes": float, "waiting": float}
MEANS = {
    "steps": [int],
    "seconds": float,
    "ranks": [{"stages": {str: STAGE}, "beside": {str: {str: STAGE}}}],
}
"""The structure of stages.json."""
ENVIRONMENT = {"started": str, "ranks_per_host": {str: int}, "packages": {str: str}}
"""The structure of environment.json."""


@dataclass(frozen=True)
class Measured:
    """A cell and its measurements.

    Attributes:
        run: the run directory of the cell.
        result: how the run ended; None before its end.
        environment: the host, versions and command, as recorded by the run; empty if it recorded
            nothing.
        curve: the test results over time; empty before the first epoch has ended.
        train_loss: the mean training loss of the first epoch; None before it has ended.
        step_seconds: the mean seconds per step in each interval between two lines of metrics.
        communication: the fraction of the time in collectives, including waiting; None if it was
            not measured.
        stages: means over the traced steps, by rank and stage; empty without a trace that covers
            whole intervals between refreshes.
        traced_seconds: the time of a traced step, averaged over steps and ranks; None without a
            trace.
        counted: the bytes that a rank passed to MPI in a traced step, averaged over ranks; None
            without a trace of whole intervals, or if overlapped messages can cross its beginning or
            end.
        interval: the number of steps after which the sequence of messages repeats.
        wire: the bytes that a rank sends per step if collectives are rings, according to the plan,
            averaged over ranks and over `interval` steps.
        handed: the bytes that a rank passes to MPI per step, according to the plan, averaged over
            ranks and over `interval` steps.
        memory: the bytes of the arenas on the rank with the largest arenas, according to the plan.
    """

    cell: Cell
    run: Path
    result: jobs.Result | None
    environment: Mapping[str, Any]
    curve: Curve
    train_loss: float | None
    step_seconds: Sequence[float]
    communication: float | None
    stages: Sequence[Mapping[str, Mapping[str, float]]]
    traced_seconds: float | None
    counted: float | None
    interval: int
    wire: float
    handed: float
    memory: int

    @property
    def complete(self) -> bool:
        """Whether the run has ended without an error."""
        return self.result is not None and self.result.code == 0

    @property
    def pending(self) -> bool:
        """Whether the study still has to run the cell, or the rest of an interrupted run."""
        return self.state in ("begun", "not run")

    @property
    def state(self) -> str:
        """The state: "complete", "failed", "begun" (running or stopped early) or "not run"."""
        if self.result is None or self.result.code == STOPPED:
            return "begun" if self.environment else "not run"
        return "complete" if self.complete else "failed"

    @property
    def step(self) -> float | None:
        """The time of a step in seconds: the median over intervals; None without metrics."""
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def images_per_second(self) -> float | None:
        """The images per second of all ranks, at the median step time; None without metrics."""
        return self.cell.options.step_batch / self.step if self.step else None

    @property
    def final(self) -> float | None:
        """The result of the last test; None before the first epoch has ended."""
        return self.curve.values[-1] if self.curve.values else None

    @property
    def crowded(self) -> bool:
        """Whether ranks shared cores on the machine of the study."""
        hosts = self.environment.get("ranks_per_host") or {}
        cores = self.result.cores if self.result else None
        return len(hosts) == 1 and cores is not None and self.cell.ranks > cores

    @property
    def overlaps(self) -> bool:
        """Whether messages overlap with computation, so that the time spent waiting is unknown."""
        return self.cell.plan.strategy.transport.overlap

    @property
    def others(self) -> float:
        """The fraction of the cores that other work used; 0 if it was not measured."""
        return (self.result.others if self.result else None) or 0.0

    @property
    def busy(self) -> bool:
        """Whether other work used so much of the machine that times are unreliable."""
        return self.others > BUSY

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """The time of a traced step by group of stages, averaged over ranks; empty if untraced."""
        if not self.stages or self.traced_seconds is None:
            return {}
        parts = dict.fromkeys([*GROUPS, WAITING, OTHER], 0.0)
        group_of = {stage: group for group, stages in GROUPS.items() for stage in stages}
        for rank in self.stages:
            for stage, means in rank.items():
                waited = means["waiting"]
                parts[WAITING] += waited / len(self.stages)
                busy = (means["seconds"] - waited) / len(self.stages)
                parts[group_of.get(stage, OTHER)] += busy
        grouped = sum(seconds for group, seconds in parts.items() if group != OTHER)
        parts[OTHER] = max(0.0, self.traced_seconds - grouped)
        return parts


def read(study: Study, directory: Path) -> list[Measured]:
    """Return the measurements of each cell of a study, from the study's directory."""
    return [_measured(cell, directory / "cells" / cell.directory) for cell in study.cells]


def _measured(cell: Cell, directory: Path) -> Measured:
    run = directory / "run"
    rows: list[dict[str, Any]] = []
    with suppress(ValueError):  # missing or damaged metrics: the cell is not complete
        rows = curves.read(run)
    means = _json(run / "stages.json", MEANS)
    if len(means.get("steps", ())) % inv_update_steps(cell.options, cell.ranks):
        means = {}  # the trace does not cover whole intervals
    planned = _planned(cell)
    return Measured(
        cell=cell,
        run=run,
        result=jobs.result(directory),
        environment=_json(run / "environment.json", ENVIRONMENT),
        curve=curves.curve(rows, cell.measure),
        train_loss=next((row["train_loss"] for row in rows if "train_loss" in row), None),
        step_seconds=_step_seconds(cell, rows),
        communication=_mean([row["communication"] for row in rows if "communication" in row]),
        stages=[rank["stages"] for rank in means.get("ranks", ())],
        traced_seconds=means.get("seconds"),
        counted=_counted(means, planned["interval"]),
        **planned,
    )


def _json(path: Path, form: Any) -> dict[str, Any]:
    """Return the content of a JSON file; empty if the file is missing or incomplete.

    Raises:
        ValueError: the content does not have the structure `form`.
    """
    try:
        content = files.read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    if not files.has_form(content, form):
        raise ValueError(f"{path} is damaged; delete the file")
    return content


def _step_seconds(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    batch = cell.options.step_batch
    speeds = [row["images_per_second"] for row in rows if "images_per_second" in row]
    if not speeds and rows:  # the run was shorter than an interval
        return [rows[-1]["seconds"] / rows[-1]["step"]]
    return [batch / speed for speed in speeds]


def _counted(means: Mapping[str, Any], interval: int) -> float | None:
    """Return the bytes per traced step; None if the trace cuts an interval or a message."""
    ranks = means.get("ranks", ())
    # Overlapped messages cross the edges of traced steps.
    beside = (
        stage for rank in ranks for named in rank["beside"].values() for stage in named.values()
    )
    if not ranks or len(means["steps"]) % interval or any(stage["bytes"] for stage in beside):
        return None
    return fmean(sum(stage["bytes"] for stage in rank["stages"].values()) for rank in ranks)


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


def best_variants(cells: Sequence[Measured]) -> set[tuple[str, int]]:
    """Return the variant with the best mean result for each strategy and number of ranks.

    Of a strategy's variants, only those with the most complete seeds are considered. If each
    strategy has a single variant, there are no best variants.
    """
    ends: dict[tuple[str, int], dict[str, list[float]]] = {}
    for cell in cells:
        if cell.complete and cell.final is not None and math.isfinite(cell.final):
            variants = ends.setdefault((cell.cell.strategy, cell.cell.ranks), {})
            variants.setdefault(cell.cell.variant, []).append(cell.final)
    chosen: set[tuple[str, int]] = set()
    if all(len(variants) == 1 for variants in ends.values()):
        return chosen
    for (_, ranks), variants in ends.items():
        most = max(map(len, variants.values()))
        means = {name: fmean(values) for name, values in variants.items() if len(values) == most}
        best = cells[0].cell.measure.best(means.values())
        chosen |= {(name, ranks) for name, mean in means.items() if mean == best}
    return chosen


# -- planned bytes -------------------------------------------------------------------------------


def _planned(cell: Cell) -> dict[str, Any]:
    """Return the bytes per step and in memory; for a large job, from some of the ranks only."""
    kfac, plan = cell.options.kfac, cell.plan
    intervals = kfac.lasting_factor_update_steps, inv_update_steps(cell.options, cell.ranks)
    kinds = Counter(_kinds(plan, *intervals))
    period, ranks, sync = kinds.total(), looked_at(plan), plan.strategy.sync
    part = {stage: sync.share_of_steps(stage) for stage in mpikfac.plan.names.EXCHANGES}
    wire = handed = 0.0
    for rank in ranks:
        for (statistics, refresh, share), count in kinds.items():
            clip = kfac.clip is not None
            messages = plan.messages(rank, statistics, refresh, clip, share)
            weight = count / period / len(ranks)
            wire += weight * sum(m.wire * part.get(m.stage, 1) for m in messages)
            handed += weight * sum(m.bytes * part.get(m.stage, 1) for m in messages)
    memory = max(sum(plan.memory(rank).values()) for rank in ranks)
    interval = math.lcm(period, sync.sync_every) if sync.local_steps else period
    return {"interval": interval, "wire": wire, "handed": handed, "memory": memory}


def _kinds(
    plan: mpikfac.plan.Plan, factor_update_steps: int, inv_update_steps: int
) -> Iterator[tuple[bool, bool, int | None]]:
    """Yield, for each step, whether factors and a refresh are due, and the refresh's slot.

    The slot is None if no refresh is due, or if refreshes are not staggered.
    """
    stagger = plan.strategy.refresh.stagger
    turn = inv_update_steps // stagger
    for step in range(math.lcm(factor_update_steps, inv_update_steps)):
        refresh = step % turn == 0
        share = step // turn % stagger if refresh and stagger > 1 else None
        yield step % factor_update_steps == 0, refresh, share


def estimators(cells: Sequence[Cell]) -> dict[str, str]:
    """Return a letter for each variant; variants that compute the same results share a letter.

    Compare letters only between cells on the same number of ranks, because BatchNorm's statistics
    depend on this number.
    """
    letters: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for cell in cells:
        kind = json.dumps(_numbers(cell), sort_keys=True, default=repr)
        letters.setdefault(cell.variant, kinds.setdefault(kind, _letter(len(kinds))))
    return letters


def _numbers(cell: Cell) -> dict[str, Any]:
    """Return the options that change a run's results, without the seed and the number of ranks."""
    values = flat(cell.options)
    numbers = {key: value for key, value in values.items() if not _of_no_number(key)}
    if numbers["batch_per_rank"]:
        del numbers["batch"]
    distribution, ranks = cell.options.distribution, training_ranks(cell.options, cell.ranks)
    strategy, settings = make_strategy(distribution, cell.options.kfac, ranks)
    if cell.options.optimizer != "kfac":
        numbers = {key: value for key, value in numbers.items() if not key.startswith("kfac.")}
        strategy, settings = strategy.first_order(), {}
    return (
        numbers
        | settings
        | {
            "refresh": repr(strategy.refresh),
            "own batches": strategy.assignment.factor_reduction == "local",
            "virtual_ranks": strategy.transport.virtual_ranks,
            "compression": repr(strategy.compression),
            "sync": repr(strategy.sync),
        }
    )


def _of_no_number(key: str) -> bool:
    """Return whether an option does not change results, or is part of the strategy."""
    return key in WRITTEN | RESOLVED or key.partition(".")[0] in JOINTS


def other_estimator(options: Options) -> bool:
    """Return whether the options select K-FAC with an estimator other than that of COMM-OPT."""
    distribution = options.distribution
    named = mpikfac.plan.NAMED.get(distribution.strategy)  # "auto" chooses the same estimator
    differs = named is not None and not named.same
    return options.optimizer == "kfac" and (
        differs or distribution.assignment.factor_reduction == "local"
    )


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"z{number - 25}"
