"""Average the loss and measures over all ranks, and measure the speed of training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import mpikfac


class Meter:
    """Means of the loss and of measures over the images of all ranks; each image counts once.

    Args:
        alone: whether `recent` covers only this rank's images and does not wait for other ranks.
        measures: the number of measures, or of the values from which they are computed.

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
        # Sums of the loss and the measures, and the number of images: for this rank so far, and
        # for all ranks as of the last call.
        self._here = torch.zeros(measures + 2, dtype=torch.float64, device=device)
        self._reported = torch.zeros(measures + 2, dtype=torch.float64)

    def add(self, loss: Tensor, measured: Tensor, images: int) -> None:
        """Count a batch, unless its loss is not finite; no data leave the device.

        Args:
            loss: the mean over the images of the batch.
            measured: the sum over the images of the batch, or one sum per measure.
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
        """Return the means since the last call of `everything`: the loss, then the measures.

        Collective over: world.
        """
        means = _means(self._total())
        self.loss = means[0]
        self._here.zero_()
        self._reported.zero_()
        return means

    def state(self) -> dict[str, Tensor]:
        """Return the counts, summed over all ranks.

        Collective over: world.
        """
        total = self._total()  # with `alone`, the means of `recent` start again after a restart
        return {"run/counted": total, "run/reported": total if self.alone else self._reported}

    def leave_out_lost(self, left: mpikfac.comm.Comm) -> None:
        """Continue with the remaining ranks; the means then lack the counts of lost ranks.

        Collective over: left.
        """
        self.comm = left
        self._reported = self._total()

    def load(self, counted: Tensor, reported: Tensor) -> None:
        """Continue from a `state`; rank 0 gets the sum of the counts of all ranks.

        Raises:
            ValueError: the counts are not those of a `state`.
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
    """Return the mean staleness of updates, from the number of updates with each staleness."""
    return sum(k * n for k, n in counts.items()) / max(1, sum(counts.values()))


def staleness_of_all(
    trainer: mpikfac.lab.AsyncSGD, comm: mpikfac.comm.Comm
) -> list[dict[int, int]]:
    """Return the number of updates of each client by staleness, since the start of the run.

    Collective over: comm.
    """
    return comm.allgather(dict(sorted(trainer.staleness.items())))[:: trainer.client_ranks]


def staleness_line(counts: Sequence[Mapping[int, int]]) -> str:
    """Return a line about the staleness of the updates of each client."""
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
        """Start the interval that `rates` measures."""
        self._marked = self._now()

    def rates(self) -> tuple[float, float]:
        """Return the images per second, and the fraction of the time spent in communication.

        Both are measured since `mark`; images are counted over all ranks.
        """
        images, seconds, talking = (now - then for now, then in zip(self._now(), self._marked))
        return images / seconds, talking / seconds

    def _now(self) -> tuple[float, float, float]:
        return self._images, self.seconds, self.trace.communication_seconds()
