"""Train a DLRM with embedding tables distributed over ranks; K-FAC trains its layers.

    pip install --no-deps recbole
    mpirun -n 2 mpikfac train-recommendation --run_dir runs/movies
    mpirun -n 2 mpikfac train-recommendation --optimizer adamw --data day.tsv

The trainer does not update the tables: Adagrad updates each table on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac.plan import span
from mpikfac_apps.options.fields import bounded
from mpikfac_apps.programs.draws import generator
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.run import main as run
from mpikfac_apps.programs.trainer import trainer_of
from mpikfac_apps.programs.work import Taken, Work
from mpikfac_apps.recommendation import clicks
from mpikfac_apps.recommendation.network import Dlrm
from mpikfac_apps.recommendation.tables import Tables

PROGRAM = "mpikfac train-recommendation"
WIDTHS = {"bounds": (">= 1",)}


@dataclass(frozen=True)
class RecommendationOptions(ProgramOptions):
    """Train a DLRM on clicks; ranks own the embedding tables.

    Args:
        data: a file of clicks in chronological order: ratings in RecBole's format (.inter), or rows
            in Criteo's format. null for MovieLens-100k from the package recbole.
        buckets: with Criteo's format, the number of rows per table, to which categories are hashed.
        tested: the fraction of the clicks, taken from the end, that is used for the test.
        width: the number of elements in a row of a table.
        bottom: the widths of the hidden layers for the numerical features.
        top: the widths of the hidden layers for the products.
        batch: the number of clicks per step, across all ranks.
        table_lr: the learning rate of Adagrad for the tables.
    """

    rates: ClassVar[Mapping[str, float]] = {"kfac": 0.003, "sgd": 0.3, "adamw": 0.03}

    data: str | None = None
    buckets: int = bounded(100_000, ">= 2")
    tested: float = bounded(0.2, "> 0", "< 1")
    width: int = bounded(16, ">= 1")
    bottom: list[int] = field(default_factory=lambda: [64], metadata=WIDTHS)
    top: list[int] = field(default_factory=lambda: [64, 32], metadata=WIDTHS)
    batch: int = bounded(512, ">= 1")
    table_lr: float = bounded(0.002, "> 0")
    epochs: int = bounded(1, ">= 1")
    run_dir: str = "runs/recommendation"

    def check(self, ranks: int, trained: int, clicks: int) -> None:
        """Check that training, each rank and the test get clicks.

        Args:
            trained: the number of clicks for training.
            clicks: the total number of clicks.

        Raises:
            ValueError: a rank would have no clicks in a step, an epoch would have no steps, or the
                test would have no clicks.
        """
        if trained == clicks:
            raise ValueError(
                f"tested={self.tested:g} leaves none of the {clicks} clicks for the test; use a "
                f"larger value, or more clicks"
            )
        if not ranks <= self.batch <= trained:
            raise ValueError(
                f"batch={self.batch} must be at least the number of ranks ({ranks}), and at most "
                f"the number of training clicks ({trained})"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `programs.run.main`.

    Collective over: world.
    """
    return run(PROGRAM, RecommendationOptions, Recommendation, argv)


class Recommendation(Work):
    """A DLRM that is trained on clicks.

    Collective over: comm, as are all methods.

    Raises:
        UserError: the data cannot be read, or does not match the options.
    """

    def __init__(
        self, comm: mpikfac.comm.Comm, options: RecommendationOptions, device: torch.device
    ) -> None:
        self.comm, self.options, self.device = comm, options, device
        with mpikfac.comm.together(comm, "options"):
            data = clicks.read(options.data, options.buckets)
            self.trained = round(len(data.labels) * (1 - options.tested))
            options.check(comm.size, self.trained, len(data.labels))
        self.numbers = standardised(data.numbers, self.trained).to(device)
        self.categories, self.labels = data.categories.to(device), data.labels.to(device)
        trace = mpikfac.Trace()
        sizes = data.numbers.shape[1], len(data.sizes), options.width
        self.model = Dlrm(*sizes, options.bottom, options.top).to(device)
        # Factors from all examples do not depend on the number of ranks.
        every = mpikfac.Estimator(subsample=1)
        self.trainer = trainer_of(comm, self.model, options, estimator=every, trace=trace)
        self.tables = Tables(
            *(comm, data.sizes, options.width, options.table_lr, options.seed, device, trace)
        )
        self.steps_per_epoch = self.trained // options.batch
        self.examples_per_step = options.batch

    def step(self, step: int) -> Taken:
        """Take a step on this rank's shard of the batch."""
        batch = self.options.batch
        order = shuffled(self.trained, self.options.seed, step // self.steps_per_epoch)
        start = step % self.steps_per_epoch * batch
        chosen, shares = self.share_of(order[start : start + batch])
        self.trainer.optimizer.zero_grad()
        rows = self.tables.rows(self.categories[chosen], shares)
        # Each rank's loss is a mean over its own clicks; owners of tables sum the ranks' gradients.
        rows.register_hook(lambda gradient: gradient * (len(chosen) / batch))
        logits = self.model(self.numbers[chosen], rows)
        loss = F.binary_cross_entropy_with_logits(logits, self.labels[chosen])
        loss.backward()
        self.trainer.step(examples=len(chosen))
        self.tables.step()
        return Taken(loss.detach(), len(chosen))

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Return the area under the ROC curve and the mean log loss over the test clicks."""
        everyone = self.comm.allgather(np.concatenate(list(self._tested()), axis=1))
        logits, labels = np.concatenate(everyone, axis=1)
        losses = np.logaddexp(0.0, logits) - labels * logits
        return {"AUC": area(logits, labels), "log loss": float(losses.mean())}

    def _tested(self) -> Iterator[np.ndarray]:
        """Yield the logits and labels of this rank's test clicks, batch by batch."""
        for some in torch.arange(self.trained, len(self.labels)).split(self.options.batch):
            chosen, shares = self.share_of(some)
            rows = self.tables.rows(self.categories[chosen], shares)
            logits = self.model(self.numbers[chosen], rows)
            yield torch.stack([logits, self.labels[chosen]]).double().cpu().numpy()

    def share_of(self, some: Tensor) -> tuple[Tensor, list[int]]:
        """Return this rank's shard of the clicks `some`, and the number of clicks of each rank."""
        ranks = self.comm.size
        spans = [span(len(some), rank, ranks) for rank in range(ranks)]
        start, stop = spans[self.comm.rank]
        return some[start:stop].to(self.device), [stop - start for start, stop in spans]

    def summary(self) -> str:
        """Summarise the network and the data; not collective."""
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        _, shares = self.share_of(torch.arange(self.options.batch))
        sent = sum(message.bytes for message in self.tables.messages(shares))
        return (
            f"DLRM of {weights:,} weights and {len(self.tables.owners)} tables, {sent:,} bytes of "
            f"rows per step on rank 0, on {self.trained:,} of {len(self.labels):,} clicks"
        )

    def state(self) -> dict[str, Any]:
        """Return the state of the trainer, and of this rank's tables."""
        return self.trainer.state_dict() | self.tables.state()

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state` from a checkpoint, on any number of ranks."""
        self.trainer.load_state_dict(checkpoint)
        self.tables.load(checkpoint)


@lru_cache(maxsize=1)
def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return a random order of the training clicks for an epoch."""
    return torch.randperm(count, generator=generator(seed, epoch), device="cpu")


def standardised(numbers: Tensor, trained: int) -> Tensor:
    """Return numerical features, scaled to mean 0 and variance 1 over the training clicks.

    A feature that is constant over these clicks is only shifted.
    """
    known = numbers[:trained]
    spread = known.std(0)
    return (numbers - known.mean(0)) / spread.where(spread > 1e-6, 1)


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve; NaN if all labels are equal.

    This is the probability that a random example with a click has a higher score than a random one
    without a click; equal scores count as a half [Hanley & McNeil 1982].
    """
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # from 1; equal scores share a rank
    hits = labels.sum()
    others = len(labels) - hits
    if not hits * others:
        return float("nan")
    return float((ranks[labels == 1].sum() - hits * (hits + 1) / 2) / (hits * others))
