"""The options of a new or resumed run: its directory, its checkpoints, its end and the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mpikfac_apps.options.fields import bounded, in_home, section

LENGTH = "length of the run, and tests"
END = "run directory, checkpoints, end"
LOG = "log and place"


@dataclass(frozen=True)
class RunOptions:
    """Where a run writes, when it ends, and where it computes.

    Args:
        max_steps: the number of steps after which the run stops; the same command with --resume
            auto continues the run. null for no limit.
        run_dir: the directory for configuration, log, metrics and checkpoints.
        resume: the checkpoint from which the run continues. "never": none; "auto": the newest
            checkpoint in run_dir, if there is one; or the directory of a checkpoint, or of another
            run, whose newest checkpoint is used.
        checkpoint_minutes: the minutes between checkpoints, which are written in the background;
            the first one is due after 2 minutes. null for none. The end of a run always writes one.
        checkpoint_every: the number of steps between additional checkpoints; null for none.
        max_time: the minutes from the start to the end of the job. The run writes a checkpoint and
            stops in time. SLURM_JOB_END_TIME has the same effect. null for no limit.
        exit_code: the exit code of a run that was stopped before the end by SIGTERM, SIGUSR1,
            SIGUSR2, Ctrl-C under `mpikfac launch`, RUN_DIR/control/stop or the end of the job.
        watchdog_timeout: the maximum duration of a step, in seconds. A longer step ends the job and
            leaves the stack of every rank in RUN_DIR/hang. Start, evaluation and checkpoints can
            take 10 times as long. null for no limit.
        log_every: the number of steps from one line of metrics to the next.
        device: the device of each rank; "auto" uses a GPU if there is one.
        threads: the number of threads per rank. null for OMP_NUM_THREADS or, if it is not set, an
            equal part of the node's cores.
        metrics: trackers that also receive the contents of metrics.jsonl: "tensorboard", "wandb",
            "mlflow", or FILE.py:FUNCTION, a function that returns a tracker; one name, or a list of
            names.
    """

    max_steps: int | None = section(LENGTH, bounded(None, ">= 1"))
    run_dir: str = section(END, in_home("runs/train"))
    resume: str = in_home("never")
    checkpoint_minutes: float | None = bounded(15.0, "> 0")
    checkpoint_every: int | None = bounded(None, ">= 1")
    max_time: float | None = bounded(None, "> 0")
    exit_code: int = bounded(0, ">= 0", "<= 255")
    watchdog_timeout: float | None = bounded(600.0, "> 0", "<= 1e8")
    log_every: int = section(LOG, bounded(10, ">= 1"))
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    threads: int | None = bounded(None, ">= 1", "<= 4096")
    metrics: list[str] | str = field(default_factory=list)

    @property
    def trackers(self) -> list[str]:
        """The trackers that also receive the contents of metrics.jsonl."""
        return [self.metrics] if isinstance(self.metrics, str) else self.metrics
