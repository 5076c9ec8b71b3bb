"""Language models on several ranks."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac_apps.checking.comparison import alike, differences
from mpikfac_apps.checking.model import subject_of
from mpikfac_apps.problems.language.networks import GPT, LSTM

pytestmark = pytest.mark.usefixtures("made_on_the_host")


@pytest.mark.parametrize("name", ["gpt", "tied gpt", "lstm"])
def test_strategies_learn_what_one_process_learns(comm, name):
    """Oracle: one process with the joined batch, in float64."""
    torch.manual_seed(0)
    model = LSTM(11, width=8) if name == "lstm" else GPT(11, 6, width=8, depth=1, heads=2)
    if name == "tied gpt":
        model.head.weight = model.embedding.weight
    asked = subject_of(model, mpikfac.KINDS, (6,), tokens=11)
    strategies = ("comm-opt", "sharded-optimizer")
    found = differences(comm, comm.Split(comm.rank), asked, 2, strategies, steps=3)
    assert all(map(alike, found.values())), found
