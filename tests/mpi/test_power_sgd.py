"""PowerSGD compared with a few lines of numpy: reductions, and training with and without K-FAC."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import (
    CommOpt,
    Compression,
    FirstOrderTrainer,
    LayerShape,
    MemOpt,
    Strategy,
    Trace,
    Transport,
    make_plan,
)
from mpikfac.comm import Grid
from mpikfac.lab import PowerSGD
from mpikfac.plan import divisors, stages
from support import inside, problem
from support.strategies import strategy_of

pytestmark = pytest.mark.lab

RANKS = mpikfac.world().size
STEPS = range(5)
SETTINGS = problem.SETTINGS | {"inv_update_steps": 2}
LAYERS = [LayerShape("conv", 19, 7), LayerShape("groups", 5, 4, 3), LayerShape("row", 6, 1)]
OWNERS = {"assignment": MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)}
WAYS = {
    "everywhere": {"assignment": CommOpt()},
    "one worker": {"assignment": MemOpt()},
    "owners": OWNERS,
    "overlapped": {"assignment": CommOpt(), "transport.fusion": 1, "transport.overlap": True},
}
if RANKS == 4:
    WAYS["in nodes"] = {"assignment": CommOpt(), "transport.ranks_per_node": 2}
    WAYS["in nodes, owners"] = {**OWNERS, "transport.ranks_per_node": 2}


class ByHand:
    """PowerSGD of the sum of all ranks' matrices: it does not matter which rank has which part."""

    def __init__(self, rank):
        self.rank, self.lost, self.right = rank, {}, {}

    def __call__(self, start, matrix):
        """Return the approximation of a matrix `[groups, outputs, inputs]` at a place."""
        matrix = matrix + self.lost.get(start, 0)
        groups, outputs, inputs = matrix.shape
        if start not in self.right:
            generator = torch.Generator("cpu").manual_seed(start)
            shape = groups, inputs, min(self.rank, outputs, inputs)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            self.right[start] = drawn.numpy()
        left = np.linalg.qr(matrix @ self.right[start])[0]
        self.right[start] = matrix.transpose(0, 2, 1) @ left
        found = left @ self.right[start].transpose(0, 2, 1)
        self.lost[start] = matrix - found
        return found


def gradient(step, rank, layer):
    """Return a rank's gradient; the last layer has no gradient in the first step."""
    shape = layer.groups, layer.outputs, layer.inputs
    values = np.random.default_rng([step, rank]).standard_normal(shape)
    return values * (step > 0 or layer.name != "row")


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
@pytest.mark.parametrize("per_node", [None, *divisors(RANKS)[1:-1]])
@pytest.mark.parametrize("rank", [1, 2, 100])
def test_sums_step_by_step(comm, rank, per_node):
    """Oracle: numpy, on the sum of all ranks; r (a + b) numbers a group, by hand."""
    strategy = Strategy(
        CommOpt(),
        compression=Compression(gradients=PowerSGD(matrix_approximation_rank=rank)),
        transport=Transport(ranks_per_node=per_node),
    )
    plan = make_plan(LAYERS, RANKS, strategy, itemsize=8).of(comm.rank)
    layout, grid, by_hand = plan.layouts.gradients, Grid(comm, 1, Trace(), per_node), ByHand(rank)
    if per_node is None:
        (message,) = stages.reduce_gradients(plan)
        sides = [(7, 19, 1), (4, 5, 3), (1, 6, 1)]
        numbers = (groups * min(rank, a, b) * (a + b) for a, b, groups in sides)
        assert message.bytes == message.size == 8 * sum(numbers)
    for step in STEPS:
        flat = torch.zeros(layout.size, dtype=torch.float64)
        for layer in LAYERS:
            mine = torch.from_numpy(gradient(step, comm.rank, layer)).reshape(-1).to(flat)
            flat[layout.offsets[layer.name] :][: len(mine)] = mine
        grid.trace.clear()
        planned = stages.reduce_gradients(plan)
        grid.exchange(planned, flat)
        assert sum(grid.trace.sent.values()) == sum(m.bytes for m in planned)
        assert all(torch.equal(flat, other) for other in comm.allgather(flat))
        for layer in LAYERS:
            start = layout.offsets[layer.name]
            whole = sum(gradient(step, other, layer) for other in range(RANKS))
            # Where nothing came, Q begins anew.
            expected = by_hand(start, whole) if whole.any() else whole
            found = flat[start:][: whole.size].reshape(whole.shape).cpu().numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
            if rank == 100:
                np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)


def blocks_of(model, trainer):
    """Yield start, parameters and rows of each block that is approximated."""
    offsets = trainer.plan.of(0).layouts.gradients.offsets
    if isinstance(trainer, FirstOrderTrainer):
        for name, parameter in model.named_parameters():
            yield offsets[name], [parameter], len(parameter) if parameter.dim() > 1 else 1
    else:
        for name in ("0", "3", "5"):
            module = model[int(name)]
            yield offsets[name], list(module.parameters()), len(module.weight)


def approximate(model, trainer, by_hand):
    """Make the gradients of a model, which are of all ranks together, what ranks receive."""
    for start, parameters, rows in blocks_of(model, trainer):
        parts = [p.grad.reshape(rows, -1) for p in parameters]
        whole = torch.cat(parts, 1).cpu().numpy()[None]
        found = torch.from_numpy(by_hand(start, whole)[0]).to(parts[0])
        for p, part in zip(parameters, found.split([part.shape[1] for part in parts], 1)):
            p.grad.copy_(part.reshape(p.shape))


def trainer_of(kind, comm, strategy):
    model = problem.network()
    if kind == "K-FAC":
        return problem.kfac(model, problem.sgd(model), comm, strategy, **SETTINGS)
    return FirstOrderTrainer(model, problem.sgd(model), comm, strategy)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["K-FAC", "FirstOrderTrainer"])
def test_training_with_approximated_gradients(comm, kind, way):
    """Oracle: one process with the joined batch, whose gradients numpy approximates; the plan."""
    strategy = strategy_of(WAYS[way], {"compression.gradients": PowerSGD()})
    trainer = trainer_of(kind, comm, strategy)
    serial = trainer_of(kind, comm.Split(comm.rank), Strategy(MemOpt()))
    by_hand, start = ByHand(2), problem.state(problem.network())
    for step in STEPS:
        trainer.trace.clear()
        found = problem.run(trainer, comm, [step])
        images, labels = problem.batch(step)
        serial.optimizer.zero_grad()
        F.cross_entropy(serial.model(images), labels).backward()
        if RANKS > 1:  # one rank sends nothing
            approximate(serial.model, trainer, by_hand)
        serial.step()
        torch.testing.assert_close(found, problem.state(serial.model), rtol=0, atol=1e-11)
        assert all(torch.equal(found, other) for other in comm.allgather(found))
        planned = sum(m.bytes for m in stages.reduce_gradients(trainer.plan.of(comm.rank)))
        assert trainer.trace.sent["reduce gradients"] == planned
    assert (found - start).norm() > 0.1
    assert inside.memory(trainer).get("wires", 0) == trainer.plan.memory(comm.rank).get("wires", 0)
