"""A network for volumes on several ranks."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac_apps.checking.comparison import alike, differences
from mpikfac_apps.checking.model import subject_of
from mpikfac_apps.problems.volumes.networks import Segmenter3d

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("made_on_the_host")]


def test_strategies_learn_what_one_process_learns(comm):
    """Oracle: one process with the joined batch, in float64."""
    torch.manual_seed(0)
    model = Segmenter3d(classes=3, channels=1, width=3, depth=1)
    asked = subject_of(model, mpikfac.KINDS, (1, 3, 4, 3))
    strategies = ("comm-opt", "sharded-optimizer")
    found = differences(comm, comm.Split(comm.rank), asked, 2, strategies, steps=3)
    assert all(map(alike, found.values())), found
