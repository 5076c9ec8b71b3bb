"""Average the loss and metrics over all ranks, and measure the speed of training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import mpikfac


class Meter:
    """Means of the loss and of metrics over the images of all ranks; each image counts once.

    Args:
        alone: whether `recent` covers only this rank's images and does not wait for other ranks.
        measures: the number of metrics, or of the values from which metrics are computed.

    Attributes:
        loss: the mean loss that `recent` or `everything` returned last.
    """

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        device: torch.device,
        alone: bool = False,
        measures: int = 1,
    ) -> None:
        self.comm, self.alone = comm, alone
        self.loss = math.nan
        # Sums of the loss and the metrics, and the number of images: for this rank so far, and as
        # of the last call of `recent`, for all ranks (with `alone`, for this rank).
        self._here = torch.zeros(measures + 2, dtype=torch.float64, device=device)
        self._reported = torch.zeros(measures + 2, dtype=torch.float64)

    def add(self, loss: Tensor, measured: Tensor, images: int) -> None:
        """Count a batch, unless its loss is not finite; no data leave the device.

        Args:
            loss: the mean loss over the images of the batch.
            measured: the metric, summed over the images of the batch, or one such sum per metric.
        """
        mean = loss.detach().double()
        sums = torch.hstack([mean * images, measured.double(), torch.full_like(mean, images)])
        self._here += torch.where(sums[0].isfinite(), sums, 0.0)

    def recent(self) -> float:
        """Return the mean loss since the last call of `recent` or `everything`.

        Collective over: world, or none if `alone`.
        """
        total = self._here.to("cpu", copy=True) if self.alone else self._total()
        self.loss = _means(total - self._reported)[0]
        self._reported = total
        return self.loss

    def everything(self) -> list[float]:
        """Return the means since the last call of `everything`: the loss, then the metrics.

        Collective over: world.
        """
        means = _means(self._total())
        self.loss = means[0]
        self._here.zero_()
        self._reported.zero_()
        return means

    def state(self) -> dict[str, Tensor]:
        """Return the sums of losses, metrics and images over all ranks, for a checkpoint.

        Collective over: world.
        """
        total = self._total()  # with `alone`, the means of `recent` start anew after a restart
        return {"run/counted": total, "run/reported": total if self.alone else self._reported}

    def leave_out_lost(self, left: mpikfac.comm.Comm) -> None:
        """Continue with the remaining ranks `left`; the means no longer include lost ranks' images.

        Collective over: left.
        """
        self.comm = left
        self._reported = self._total()

    def load(self, counted: Tensor, reported: Tensor) -> None:
        """Continue from the result of `state`; rank 0 takes over the sums of all ranks.

        Raises:
            ValueError: the tensors cannot be the result of `state`.
        """
        for name, value in {"run/counted": counted, "run/reported": reported}.items():
            if (value.dtype, value.shape) != (torch.float64, self._reported.shape):
                form = list(self._reported.shape)
                raise ValueError(f"item {name!r} must be float64 {form}; it is {list(value.shape)}")
        if self.comm.rank == 0:
            self._here.copy_(counted)
        self._reported = self._here.to("cpu", copy=True) if self.alone else reported

    def _total(self) -> Tensor:
        return torch.tensor(self.comm.allgather(self._here.tolist()), dtype=torch.float64).sum(0)


def _means(sums: Tensor) -> list[float]:
    *summed, images = sums.tolist()
    return [total / images if images else math.nan for total in summed]


def mean_staleness(counts: Mapping[int, int]) -> float:
    """Return the mean staleness of updates; `counts` maps each staleness to a number of updates."""
    return sum(k * n for k, n in counts.items()) / max(1, sum(counts.values()))


def staleness_of_all(
    trainer: mpikfac.lab.AsyncSGD, comm: mpikfac.comm.Comm
) -> list[dict[int, int]]:
    """Return each client's number of updates with each staleness, since the start of the run.

    Collective over: comm.
    """
    return comm.allgather(dict(sorted(trainer.staleness.items())))[:: trainer.client_ranks]


def staleness_line(counts: Sequence[Mapping[int, int]]) -> str:
    """Return a line about the staleness of each client's updates."""
    clients = (
        f"client {number}: mean {mean_staleness(histogram):.2f} ("
        + ", ".join(f"{updates} with {staleness}" for staleness, updates in histogram.items())
        + ")"
        for number, histogram in enumerate(counts)
    )
    return f"staleness of updates: {'; '.join(clients)}"


class Speed:
    """Measure this rank's time in training steps, excluding evaluations and checkpoints.

    Attributes:
        seconds: the time of all steps since the run began, including those before restarts.
    """

    def __init__(self, trace: mpikfac.Trace) -> None:
        self.trace = trace
        self.seconds = 0.0
        self._images = 0
        self._marked = self._now()

    @contextmanager
    def step(self, images: int) -> Iterator[None]:
        """Time the body as a step on a total of `images` images over all ranks."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self._images += images

    def mark(self) -> None:
        """Start the interval over which `rates` averages."""
        self._marked = self._now()

    def rates(self) -> tuple[float, float]:
        """Return the images per second, and the fraction of the time spent in communication.

        Both are averages since the last call of `mark`; images are counted over all ranks.
        """
        images, seconds, talking = (now - then for now, then in zip(self._now(), self._marked))
        return images / seconds, talking / seconds

    def _now(self) -> tuple[float, float, float]:
        return self._images, self.seconds, self.trace.communication_seconds()
