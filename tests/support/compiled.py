"""Train networks compiled by `torch.compile`, and count what the compiler creates and runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

import mpikfac

STEPS, EVERY = 7, 3
INTERVALS = {"factor_update_steps": EVERY, "inv_update_steps": EVERY}
ORDINARY = sum(step % EVERY > 0 for step in range(STEPS))
"""The number of steps without new factors."""


class Problem(NamedTuple):
    """A network with a batch; `draw` creates the network, always with the same weights."""

    draw: Callable[[], nn.Module]
    inputs: Tensor
    labels: Tensor
    coverage: mpikfac.Coverage = mpikfac.Coverage()

    def made(self) -> nn.Module:
        """Return the network."""
        torch.manual_seed(0)
        return self.draw()

    def loss(self, call: Callable[[Tensor], Tensor], chosen: slice = slice(None)) -> Tensor:
        """Return the mean loss of the chosen examples."""
        return F.cross_entropy(call(self.inputs[chosen]), self.labels[chosen])

    def kfac(self, network: nn.Module, **settings: Any) -> mpikfac.KFACOptimizer:
        """Return K-FAC for the network, by default on this process alone."""
        usual = {"comm": MPI.COMM_SELF, "coverage": self.coverage, **INTERVALS}
        return mpikfac.KFACOptimizer(network, **(usual | settings))

    def descend(self, optimizer: Any, call: Callable[[Tensor], Tensor], steps: int = STEPS) -> None:
        """Train for some steps; random draws, such as dropout's, are the same in all steps."""
        for _ in range(steps):
            optimizer.zero_grad()
            torch.manual_seed(0)
            self.loss(call).backward()
            optimizer.step()


class Counter:
    """A backend that counts graphs, operations and runs, and delegates to another backend."""

    def __init__(self, backend: str) -> None:
        self.backend = lookup_backend(backend)
        self.graphs = self.operations = self.runs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Return the graph, compiled by the other backend."""
        self.graphs += 1
        self.operations += sum("call" in node.op for node in module.graph.nodes)
        compiled = self.backend(module, inputs)

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return compiled(*arguments)

        return run

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of compiled graphs, operations and graph breaks since `fresh`."""
        return self.graphs, self.operations, sum(counters["graph_break"].values())


def fresh(backend: str = "eager") -> Counter:
    """Return a counter for a compiler that has compiled nothing so far.

    Trainers that other tests have dropped may still wait for Python's garbage collector, and keep
    compiled models from running until then.
    """
    gc.collect()
    torch.compiler.reset()
    counters.clear()
    return Counter(backend)


def weights(network: nn.Module) -> Tensor:
    """Return all weights as a vector."""
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def alone(problem: Problem, backend: str) -> Tensor:
    """Return the weights after training, with gradients of a copy that no trainer has seen.

    In steps without new factors, the compiled copy computes gradients and buffers instead of the
    network, which is never compiled.
    """
    network, other = problem.made(), problem.made()
    optimizer, call = problem.kfac(network), torch.compile(other, backend=backend)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(0)
        if step % EVERY == 0:
            problem.loss(network).backward()
        else:
            other.load_state_dict(network.state_dict())
            other.zero_grad()
            problem.loss(call).backward()
            for parameter, source in zip(network.parameters(), other.parameters()):
                parameter.grad = source.grad
            for buffer, source in zip(network.buffers(), other.buffers()):
                buffer.copy_(source)
        optimizer.step()
    optimizer.trainer.close()
    return weights(network)


def check(problem: Problem, backend: str) -> Tensor:
    """Compare compiled training with K-FAC with that of SGD, and with `alone`; return the weights.

    Raises:
        AssertionError: the compiler behaves differently from SGD, an ordinary step does not run the
            compiled graphs, or the weights differ in any bit.
    """
    counter, network = fresh(backend), problem.made()
    compiled = torch.compile(network, backend=counter)
    problem.descend(torch.optim.SGD(network.parameters(), 0.01), compiled)
    expected, runs = counter.counts, counter.runs / STEPS
    counter, network = fresh(backend), problem.made()
    optimizer = problem.kfac(network)
    problem.descend(optimizer, torch.compile(network, backend=counter))
    optimizer.trainer.close()
    assert counter.counts == expected and counter.graphs > 0
    assert counter.runs == runs * ORDINARY
    assert torch.equal(weights(network), alone(problem, backend))
    return weights(network)
