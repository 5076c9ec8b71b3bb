"""Train a graph network on all nodes of a graph in every step; ranks own disjoint sets of nodes.

    mpirun -n 2 mpikfac train-graph
    mpirun -n 2 mpikfac train-graph --aggregate delayed --delay 5

A rank computes the rows of its own nodes, which are the examples for K-FAC. With
`--aggregate exact`, the results do not depend on the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac_apps.graphs import aggregates, data, partitions
from mpikfac_apps.graphs.aggregates import Halo, Sums
from mpikfac_apps.graphs.networks import KINDS, GraphNetwork
from mpikfac_apps.graphs.parts import inside, part_of
from mpikfac_apps.options.fields import bounded, choice
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.run import main as run
from mpikfac_apps.programs.trainer import trainer_of
from mpikfac_apps.programs.work import Taken, Work

log = logging.getLogger("mpikfac.train")


@dataclass(frozen=True)
class GraphOptions(ProgramOptions):
    """Train a graph network on all nodes of a graph in every step, distributed over ranks.

    Args:
        epochs: the number of steps, each on all nodes.
        graph: "planted" communities; "karate", a club of 34 members (package networkx); or
            "surface", a mesh of the brain with 10,242 nodes (packages nilearn and nibabel).
        planted: the settings of the planted communities.
        known: the fraction of the nodes whose classes are known during training; the others are
            the test set.
        partition: how nodes are assigned to ranks: in order ("contiguous"), each to the rank with
            most of its neighbours ("greedy"), or by METIS ("metis", package pymetis).
        model: "gcn" for graph convolutions, or "sage" for GraphSAGE with means.
        layers: the number of layers; each layer except the first needs rows from other ranks.
        hidden: the width of the hidden layers.
        aggregate: what a rank receives for neighbours on other ranks: their exact rows ("exact"),
            nothing ("local"), rows from earlier steps ("delayed"), or one mean per rank ("means").
        delay: with aggregate=delayed, the delay of rows in steps; 0 for exact rows. Each step
            exchanges every `delay`-th row.
    """

    rates: ClassVar[Mapping[str, float]] = {"kfac": 0.003, "sgd": 0.2, "adamw": 0.01}

    epochs: int = bounded(50, ">= 1")
    graph: str = choice("planted", data.GRAPHS)
    planted: data.Planted = field(default_factory=data.Planted)
    known: float = bounded(0.05, "> 0", "< 1")
    partition: str = choice("greedy", partitions.PARTITIONS)
    model: str = choice("gcn", KINDS)
    layers: int = bounded(3, ">= 1")
    hidden: int = bounded(64, ">= 1")
    aggregate: str = choice("exact", aggregates.AGGREGATES)
    delay: int = bounded(5, ">= 0")
    run_dir: str = "runs/graph"


class GraphWork(Work):
    """The training of a graph network; a rank computes the rows of its own nodes.

    Collective over: comm, as are all methods.

    Raises:
        UserError: a package is missing, a rank or the test set would have no nodes, or a setting is
            not supported.

    Attributes:
        sums: the sums over neighbours in training.
        trace: the seconds and bytes of every stage of a step.
    """

    steps_per_epoch = 1
    measures = ("accuracy",)

    def __init__(
        self, comm: mpikfac.comm.Comm, options: GraphOptions, device: torch.device
    ) -> None:
        with mpikfac.comm.together(comm, "options"):
            graph = data.graph_of(options.graph, options.planted, options.seed)
            owners = partitions.dealt(options.partition, graph, comm.size)
            split = data.split(graph, options.known, options.seed)
        self._comm, self._options, self.trace = comm, options, mpikfac.Trace()
        self.examples_per_step = nodes = len(owners)
        hidden = [options.hidden] * (options.layers - 1)
        model = GraphNetwork(options.model, [graph.inputs, *hidden, graph.classes]).to(device)
        estimator = mpikfac.Estimator(subsample=1)  # uses all nodes, regardless of their owners
        self.trainer = trainer_of(comm, model, options, None, estimator, self.trace)
        group, own = mpikfac.comm.Group(comm, 0, self.trace, "world"), owners == comm.rank
        share = float(own.mean())

        def sums_of(name: str, edges: data.Places) -> Sums:
            part = part_of(comm.rank, owners, model.kind.weights(edges, nodes)).to(device)
            halo = Halo(group, part, share)
            return aggregates.sums_of(name, halo, hidden, options.delay, lambda: self.trainer.steps)

        edges = inside(graph.edges, owners) if options.aggregate == "local" else graph.edges
        self.sums = sums_of(options.aggregate, edges)
        self._exact = sums_of("exact", graph.edges)
        features = torch.from_numpy(graph.features[own]).to(device, torch.get_default_dtype())
        self._inputs = model.inputs(features, self.sums.first)
        self._test_inputs = model.inputs(features, self._exact.first)
        known = torch.from_numpy(split).to(device)
        self._known = known[torch.from_numpy(own).to(device)]
        self._labels = torch.from_numpy(graph.labels[own]).to(device)
        self._weight = 1 / (share * int(known.sum()))  # see `aggregates.of_all`

    def step(self, step: int) -> Taken:
        """Take a step on all nodes; only nodes with known classes contribute to the loss."""
        self.trainer.optimizer.zero_grad()
        logits = self.trainer.model(self._inputs, self.sums.hidden)[self._known]
        labels = self._labels[self._known]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        (self._weight * loss).backward()
        self.trainer.step(examples=len(self._labels))
        right = (logits.argmax(1) == labels).sum()
        return Taken(loss.detach() / max(1, len(labels)), len(labels), right.double()[None])

    def test(self) -> dict[str, float]:
        """Return the accuracy on nodes whose classes are unknown in training, with exact sums."""
        self.trainer.model.eval()
        with torch.no_grad():
            logits = self.trainer.model(self._test_inputs, self._exact.hidden)[~self._known]
        self.trainer.model.train()
        right = (logits.argmax(1) == self._labels[~self._known]).sum()
        right, nodes = mpikfac.comm.summed(self._comm, [int(right), len(logits)])
        return {"accuracy": right / nodes}

    def summary(self) -> str:
        """Summarise the network and the graph; not collective."""
        options, nodes = self._options, self.examples_per_step
        return f"{options.model} on the graph {options.graph} of {nodes} nodes"

    def state(self) -> dict[str, Any]:
        """Return the state of the trainer, and this rank's delayed rows."""
        return self.trainer.state_dict() | self._late_rows()

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state`; if the number of ranks changed, delayed rows start at 0."""
        self.trainer.load_state_dict(checkpoint)
        late = self._late_rows()
        if all(name in checkpoint for name in late):
            for name, rows in late.items():
                rows.copy_(torch.as_tensor(checkpoint[name]))
        elif self._comm.rank == 0:
            log.warning(
                "delayed rows restart from 0; to keep them, use the same number of ranks as before"
            )

    def _late_rows(self) -> dict[str, Tensor]:
        """Return this rank's delayed rows, by names with the rank and the number of ranks."""
        return {
            f"late/{layer}/{name}/{self._comm.rank} of {self._comm.size}": rows
            for layer, late in enumerate(self.sums.late)
            for name, rows in late.items()
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print a line after each step; return 0, or `exit_code` after a stop.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """
    return run("mpikfac train-graph", GraphOptions, GraphWork, argv)
