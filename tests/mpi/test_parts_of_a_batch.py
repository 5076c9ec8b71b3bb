"""Layers whose calls see only a part of the batch, such as experts, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import MemOpt, Strategy, Transport
from mpikfac.numerics import triangles
from support import inside, problem

WORDS = 8  # of a rank
ROUTED = (7, 2, 0, 8)  # words of the first expert on each rank; the second expert has the rest


class Experts(nn.Module):
    """A trunk of all words, two experts of some words each, and a head of all words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x).tanh()
        h = h.index_put((first,), self.experts[0](h[first]).tanh())
        if not first.all():
            h = h.index_put((~first,), self.experts[1](h[~first]).tanh())
        return self.head(h)


def batch(ranks: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(1)
    with torch.device("cpu"):
        x = torch.randn(ranks * WORDS, 4, generator=made, dtype=torch.float64)
        first = torch.cat([torch.arange(WORDS) < count for count in ROUTED[:ranks]])
        y = torch.randint(3, (len(x),), generator=made)
    return x.to(problem.DEVICE), y.to(problem.DEVICE), first.to(problem.DEVICE)


def learned(comm, shard, parts=1, **settings):
    """Return K-FAC after a step on a shard of the batch of all ranks."""
    model = Experts().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "preconditioner": "inverse",
        "subsample": 1,
        "part_of_batch": ["experts"],
    } | settings
    kfac = problem.kfac(model, optimizer, comm, **settings)
    for x, y, first in zip(*(part.chunk(parts) for part in shard)):
        outputs = model(x, first)
        kfac.record(outputs)
        F.cross_entropy(outputs, y).div(parts).backward()
    kfac.step()
    return kfac


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("comm-opt", {}),
        ("mem-opt", {"fisher_type": "type-2"}),
        ("comm-opt", {"preconditioner": "eva"}),
        ("comm-opt", {"preconditioner": "ekfac"}),
        ("overlap", {}),
    ],
)
def test_factors_of_experts_do_not_depend_on_the_number_of_ranks(comm, strategy, settings):
    """Oracle: one process with the joined batch; a rank may have no word for an expert."""
    joined = batch(comm.size)
    shard = tuple(part.chunk(comm.size)[comm.rank] for part in joined)
    if strategy == "overlap":
        strategy = Strategy(MemOpt(), transport=Transport(overlap=True))
    kfac = learned(comm, shard, strategy=strategy, **settings)
    inside.settle(kfac)
    expected = learned(comm.Split(comm.rank), joined, **settings)
    for name, factor in inside.factors(kfac).items():
        torch.testing.assert_close(factor, inside.factors(expected)[name], rtol=1e-9, atol=1e-12)
    kfac.close()
    expected.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_factors_of_experts_are_means_over_their_words(comm, parts, caplog):
    """Oracle: autograd, for the loss of each word alone; micro-batches leave no trace."""
    alone = comm.Split(comm.rank)
    x, y, first = batch(2)
    kfac = learned(alone, (x, y, first), parts)
    assert "numbers of examples" not in caplog.text
    model = Experts().double()
    with torch.no_grad():
        h = model.trunk(x).tanh()
    for number, expert in enumerate(model.experts):
        g, mine = [], first if number == 0 else ~first
        for a, label in zip(h[mine], y[mine]):
            out = expert(a)
            g += torch.autograd.grad(F.cross_entropy(model.head(out.tanh()), label), [out])
        a = torch.cat([h[mine], h.new_ones(int(mine.sum()), 1)], 1)
        g = torch.stack(g)
        for side, rows in (("A", a), ("G", g)):
            found = triangles.unfold_triangle(inside.factors(kfac)[f"experts.{number}.{side}"])
            torch.testing.assert_close(found, rows.T @ rows / len(rows))
    kfac.close()
