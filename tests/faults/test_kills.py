"""kill -9 at random moments while a run writes checkpoint after checkpoint."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch

import mpikfac
from mpikfac import find_checkpoint
from mpikfac.checkpoint import Checkpoint
from programs import endless
from support.forked import FORK, start
from support.launch import launch

pytestmark = [pytest.mark.slow, pytest.mark.gate]

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
KILLS = int(os.environ.get("MPIKFAC_SOAK_KILLS", "100" if SOAK else "5"))


def check(found: Checkpoint | None, ranks: int, at_least: int) -> None:
    """Check that the checkpoint is the whole state of a step, and not older than acknowledged."""
    assert found is not None and found.step >= at_least
    expected: dict[str, Any] = {}
    for rank in range(ranks):
        expected |= endless.state(found.step, rank)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("ranks", [1, 2, 4] if SOAK else [1, 2])
@pytest.mark.parametrize("body", [endless.save, endless.write])
def test_a_killed_rank_costs_no_acknowledged_checkpoint(tmp_path, body, ranks) -> None:
    """Oracle: the last step acknowledged as written on a rank, and the whole state of a step."""
    chance = random.Random(ranks)
    acknowledged = FORK.Value("q", 0, lock=False)

    def acknowledge(step: int) -> None:
        acknowledged.value = step

    for _ in range(KILLS):
        first = acknowledged.value + 1
        processes = start(ranks, lambda comm: body(comm, tmp_path, first, acknowledge))  # noqa: B023
        while acknowledged.value < first and all(process.is_alive() for process in processes):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        chance.choice(processes).kill()
        for process in processes:
            process.join()
        assert acknowledged.value >= first
        found = find_checkpoint(mpikfac.world(), tmp_path)
        check(found, ranks, acknowledged.value)
        acknowledged.value = found.step


@pytest.mark.timeout(600 + 20 * KILLS)
@pytest.mark.parametrize("ranks", [1, 2, 4] if SOAK else [2])
@pytest.mark.parametrize("body", ["save", "write"])
def test_a_rank_that_is_killed_under_mpi_costs_no_acknowledged_checkpoint(
    tmp_path, body, ranks
) -> None:
    """Oracle: the last step that rank 0 has printed."""
    chance, step = random.Random(ranks), 0
    for _ in range(KILLS if SOAK else 1):
        options = [str(step + 1), str(chance.randrange(ranks)), str(chance.uniform(0, 0.1))]
        ended = launch(ranks, endless.__file__, str(tmp_path), body, *options)
        assert ended.returncode != 0
        steps = [int(line) for line in ended.stdout.split() if line.isdecimal()]
        assert steps, ended.stderr
        found = find_checkpoint(mpikfac.world(), tmp_path)
        check(found, ranks, steps[-1])
        step = found.step
