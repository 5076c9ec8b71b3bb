"""Write the metrics of a run with TensorBoard, wandb and MLflow, by default without network access.

A resumed run continues the metrics that it wrote before: TensorBoard drops the events after the
checkpoint, and wandb and MLflow find the run by its id.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mpikfac_apps.tracking.start import Start

AT_ONCE = 100  # the maximum number of values in a request to MLflow


class TensorBoard:
    """Events in RUN/tensorboard."""

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, after = str(start.directory / "tensorboard"), start.step + 1
        self._writer = SummaryWriter(folder, purge_step=after)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write values, and flush the event file, so that it is complete at each checkpoint."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A wandb run in RUN/wandb, or on a server with WANDB_MODE=online.

    The step is an ordinary value, because wandb's own steps cannot go back to a checkpoint.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        self._run = wandb.init(
            dir=str(start.directory),
            id=start.id,
            name=start.directory.name,
            config=dict(start.options),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", silent=True),  # rank 0 prints the log
        )
        self._run.define_metric("*", step_metric="step")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log values."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Wait until all values are written."""
        self._run.finish()


class MLflow:
    """An MLflow run in RUN/mlflow, or on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, start: Start) -> None:
        import mlflow

        folder = start.directory.absolute() / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder / 'runs.db'}"
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mpikfac")
        experiment = self._client.get_experiment_by_name(name)
        group = experiment.experiment_id if experiment else self._client.create_experiment(name)
        runs = self._client.search_runs([group], f"tags.mpikfac = '{start.id}'")
        tags = {"mpikfac": start.id, "mlflow.runName": start.directory.name}
        run = runs[0] if runs else self._client.create_run(group, tags=tags)
        self._run = run.info.run_id
        self._client.update_run(self._run, "RUNNING")
        if not runs:  # MLflow accepts a parameter only once
            items = start.options.items()
            values = [mlflow.entities.Param(key, str(value)) for key, value in items]
            for first in range(0, len(values), AT_ONCE):
                self._client.log_batch(self._run, params=values[first : first + AT_ONCE])

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log values."""
        now = int(time.time() * 1000)
        lines = [self._metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._run, metrics=lines)

    def close(self) -> None:
        """Record that the run has ended."""
        self._client.set_terminated(self._run)
