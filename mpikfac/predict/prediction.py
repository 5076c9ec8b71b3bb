"""The input and the output of a prediction: a job, and its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpikfac.plan import BASIS_EVERY, FACTOR_EVERY, AdamGrafting, Grafting


@dataclass(frozen=True)
class Job:
    """Describe the training.

    Attributes:
        batch: images per rank.
        stragglers: standard deviation of the logarithm of a rank's computing time.
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
        updates: updates per second, of all clients.
        staleness: the mean number of other clients' updates between the weights that an update was
            computed from and the update itself.
        busy: the fraction of the time in which a server works.
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
        exposed: the time of the step in which a rank waits for messages without computing.
        waiting: the time of the step in which a rank waits for slower ranks to compute.
        overlapped: the time of messages that are sent during computations, hidden or not.
        sent: bytes that a rank sends if collectives are rings.
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
        mean: the mean over all steps, also of `stages` and `sent`.
        ordinary: a step without new factors.
        factors: a step with new factors.
        refresh: a step with new factors and new bases.
        memory: bytes of the plan's arenas and of grafting, on the rank with the most.
        clients: the updates of asynchronous clients; otherwise None.
    """

    mean: Step
    ordinary: Step
    factors: Step
    refresh: Step
    memory: int
    clients: Clients | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return asdict(self)
