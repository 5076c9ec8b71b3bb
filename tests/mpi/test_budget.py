"""The budget on several ranks: cuts, intervals and restarts match those of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import CommOpt, MemOpt, Refresh, Strategy, Transport
from support import problem

RANKS = mpikfac.world().size
EXAMPLES = 12 * RANKS
STRATEGIES = {
    "comm-opt": None,
    "mem-opt": Strategy(MemOpt()),
    "owners": Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
    "overlapped": Strategy(CommOpt(), transport=Transport(overlap=True)),
    "late": Strategy(
        CommOpt(), refresh=Refresh(stagger=5), transport=Transport(reduce_factors_at="inverses")
    ),
}


def optimizer(comm, strategy=None) -> mpikfac.KFACOptimizer:
    torch.manual_seed(0)
    layers = nn.Linear(300, 270), nn.Tanh(), nn.Linear(270, 3)
    model = nn.Sequential(*layers).to(problem.DEVICE, torch.float64)
    return mpikfac.KFACOptimizer(model, comm=comm, strategy=strategy)


def train(kfac, comm, steps) -> torch.Tensor:
    """Train on the rank's shard of batches of `EXAMPLES`; return all weights."""
    model, shard = kfac.trainer.model, slice(comm.rank, None, comm.size)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(EXAMPLES, 300, generator=generator, device="cpu").double()[shard]
        y = (torch.arange(EXAMPLES) % 3)[shard]
        kfac.zero_grad()
        F.cross_entropy(model(x.to(problem.DEVICE)), y.to(problem.DEVICE)).backward()
        kfac.step()
    return torch.cat([p.detach().flatten().cpu().clone() for p in model.parameters()])


def orders(kfac) -> list[int]:
    return [factor.order for layer in kfac.trainer.plan.layers for factor in layer.factors]


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_cut_and_train_as_one(comm, name):
    """Oracle: one process on the joined batch; blocks of at most 128 rows by hand."""
    kfac = optimizer(comm, STRATEGIES[name])
    alone_comm = comm.Split(comm.rank)
    alone = optimizer(alone_comm, STRATEGIES[name])
    found, expected = train(kfac, comm, range(7)), train(alone, alone_comm, range(7))
    assert orders(kfac) == orders(alone) == [100, 100, 101, 90, 90, 90, 90, 90, 91, 3]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert all(torch.equal(found, other) for other in comm.allgather(found))
    kfac.trainer.close()
    alone.trainer.close()
    alone_comm.Free()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_goes_on_from_another_placement(comm, name):
    """Oracle: the run without a stop; "late" averages factors at other steps than the others."""
    first = optimizer(comm, STRATEGIES[name])
    train(first, comm, range(3))
    state = problem.whole_state(first.trainer, comm)
    second = optimizer(comm, STRATEGIES[name] if name == "late" else None)
    second.trainer.load_state_dict(state)
    assert orders(second) == orders(first)
    found, expected = (train(kfac, comm, range(3, 7)) for kfac in (second, first))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    first.trainer.close()
    second.trainer.close()


def test_ranks_whose_states_have_seen_other_batches_are_refused(comm):
    """Oracle: the line; of one rank, the state."""
    kfac = optimizer(comm)
    train(kfac, comm, range(1))
    state = problem.whole_state(kfac.trainer, comm)
    if comm.rank == RANKS - 1 and RANKS > 1:
        state["kfac/seen"] = state["kfac/seen"].replace(f"{EXAMPLES}", "1000")
    fresh = optimizer(comm)
    if RANKS > 1:
        with pytest.raises(mpikfac.UserError, match="ranks disagree on kfac/seen"):
            fresh.trainer.load_state_dict(state)
    else:
        fresh.trainer.load_state_dict(state)
        assert orders(fresh) == orders(kfac)
