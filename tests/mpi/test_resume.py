"""A run resumes to the last bit: every preconditioner, placement and way to load a state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, KFACOptimizer, MemOpt, Refresh, Strategy, Transport, UserError
from mpikfac.preconditioners import PRECONDITIONERS
from support import gradients

RANKS = mpikfac.world().size
PLACEMENTS = {
    "every rank": Strategy(CommOpt()),
    "owners": Strategy(MemOpt()),
    "owners step": Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
    "late": Strategy(transport=Transport(reduce_factors_at="inverses")),
    "delayed": Strategy(CommOpt(), refresh=Refresh(staleness=1)),
    "in turns": Strategy(CommOpt(), refresh=Refresh(stagger=2)),
}
EVERY_RANK = "every rank", "in turns"
OF_GRADIENT = {name for name, each in PRECONDITIONERS.items() if each.form.of == "gradient"}
INTERVALS = (1, 2), (2, 4), (4, 4)  # of factors, of decompositions
STOP, END = 5, 9


def optimizer(comm, preconditioner, placement, intervals):
    factors, inverses = intervals
    return KFACOptimizer(
        gradients.network("convolutional"),
        lr=0.05,
        comm=comm,
        strategy=PLACEMENTS[placement],
        preconditioner=preconditioner,
        factor_update_steps=factors,
        inv_update_steps=inverses,
    )


def run(kfac, comm, steps):
    for step in steps:
        inputs, labels = gradients.batch("convolutional", step)
        kfac.zero_grad()
        model = kfac.trainer.model
        mine, of_mine = inputs.chunk(RANKS)[comm.rank], labels.chunk(RANKS)[comm.rank]
        F.cross_entropy(model(mine), of_mine).backward()
        kfac.step()
    return torch.nn.utils.parameters_to_vector(kfac.trainer.model.parameters()).detach().clone()


def union(comm, state):
    """Return the shares of all ranks as one state."""
    return {name: value for share in comm.allgather(state) for name, value in share.items()}


WAYS = {
    "own": lambda _, state: state,
    "union": union,
    "rank 0's": lambda comm, state: comm.bcast(state),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_run_resumes_to_the_last_bit_from_what_is_promised(comm, preconditioner, placement, way):
    """Oracle: the undisturbed run. A share that is not enough is refused, with a remedy."""
    whole = placement in EVERY_RANK and preconditioner not in OF_GRADIENT
    # Each pair tries another interval.
    turn = list(PRECONDITIONERS).index(preconditioner) + list(PLACEMENTS).index(placement)
    arguments = preconditioner, placement, INTERVALS[turn % len(INTERVALS)]
    try:
        kfac, resumed = optimizer(comm, *arguments), optimizer(comm, *arguments)
    except ValueError as refusal:  # choices that exclude each other
        pytest.skip(str(refusal))
    run(kfac, comm, range(STOP))
    resumed.trainer.model.load_state_dict(kfac.trainer.model.state_dict())
    state = WAYS[way](comm, kfac.state_dict())
    try:
        resumed.load_state_dict(state)
    except UserError as refusal:
        assert way == "rank 0's" and not whole and "load each rank's own file" in str(refusal)
    else:
        found, expected = (run(each, comm, range(STOP, END)) for each in (resumed, kfac))
        assert torch.equal(found, expected)
