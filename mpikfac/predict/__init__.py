"""Predict the step times of a plan on a machine."""

from __future__ import annotations

from mpikfac.predict.costs import level_of
from mpikfac.predict.distributions import choose_distribution, distribution_seconds
from mpikfac.predict.machine import (
    Level,
    Machine,
    Network,
    Sample,
    load_machine,
    published_machines,
)
from mpikfac.predict.prediction import Clients, Job, Prediction, Step
from mpikfac.predict.simulator import cheapest, simulate
from mpikfac.predict.tuning import choose, tuned

__all__ = [
    "Clients",
    "Job",
    "Level",
    "Machine",
    "Network",
    "Prediction",
    "Sample",
    "Step",
    "cheapest",
    "choose",
    "choose_distribution",
    "distribution_seconds",
    "level_of",
    "load_machine",
    "published_machines",
    "simulate",
    "tuned",
]
