"""The input and the output of a prediction: a job, and its predicted steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpikfac.plan import BASIS_EVERY, FACTOR_EVERY, AdamGrafting, Grafting


@dataclass(frozen=True)
class Job:
    """Describe a training job.

    Attributes:
        batch: the number of images per rank.
        stragglers: the standard deviation of the logarithm of a rank's computing time.
        grafting: determines the lengths of directions.
    """

    model: str
    batch: int
    factor_update_steps: int = FACTOR_EVERY
    inv_update_steps: int = BASIS_EVERY
    stragglers: float = 0.0
    grafting: Grafting = AdamGrafting()


@dataclass(frozen=True)
class Clients:
    """Store the predictions for asynchronous clients and their servers.

    Attributes:
        number: the number of clients.
        updates: the number of updates per second by all clients together.
        staleness: the mean number of other clients' updates that are applied between the fetch of
            weights for an update and the update itself.
        busy: the fraction of the time during which a server is busy.
    """

    number: int
    updates: float
    staleness: float
    busy: float


@dataclass(frozen=True)
class Step:
    """Store the predictions for a kind of step.

    Attributes:
        seconds: the duration of the step.
        exposed: the time in a step during which a rank waits for messages without computing.
        waiting: the time in a step during which a rank waits for slower ranks to compute.
        overlapped: the time of messages that are sent during computations, hidden by these or not.
        sent: the bytes that a rank sends if all collectives are rings.
        stages: the time by stage, including the hidden time of overlapped messages.
    """

    seconds: float
    exposed: float
    waiting: float
    overlapped: float
    sent: float
    stages: Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
    """Store the predicted steps of a plan on a machine.

    Attributes:
        mean: the mean over all steps, including the means of `stages` and `sent`.
        ordinary: a step without new factors or new bases.
        factors: a step with new factors, but no new bases.
        refresh: a step with new factors and new bases.
        memory: the bytes of the plan's arenas and of grafting, on the rank where they are largest.
        clients: the predictions for asynchronous clients; None if there are none.
    """

    mean: Step
    ordinary: Step
    factors: Step
    refresh: Step
    memory: int
    clients: Clients | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all values as nested dictionaries, for JSON."""
        return asdict(self)
