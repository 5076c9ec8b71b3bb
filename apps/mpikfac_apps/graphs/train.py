"""Train a graph network on all nodes of a graph in every step; the nodes are dealt to ranks.

    mpirun -n 2 python -m mpi4py apps/train_graph.py
    mpirun -n 2 python -m mpi4py apps/train_graph.py --aggregate delayed --delay 5

A rank computes the rows of its own nodes; K-FAC takes nodes as examples. With the exact aggregate,
any number of ranks computes the numbers of a single rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac_apps.graphs import aggregates, data, partitions
from mpikfac_apps.graphs.networks import KINDS, Aggregate, GraphNetwork
from mpikfac_apps.graphs.parts import Part, inside, part_of, with_means
from mpikfac_apps.options.fields import bounded, choice
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.run import main as run
from mpikfac_apps.programs.trainer import trainer_of
from mpikfac_apps.programs.work import Taken, Work

log = logging.getLogger("mpikfac.train")


@dataclass(frozen=True)
class GraphOptions(ProgramOptions):
    """Train a graph network on all nodes of a graph in every step; the nodes are dealt to ranks.

    Args:
        epochs: the number of steps, each on all nodes.
        graph: "planted" communities; "karate", a club of 34 members (package networkx); or
            "surface", a mesh of the brain with 10,242 nodes (packages nilearn and nibabel).
        planted: the planted communities.
        known: the share of the nodes whose classes are known in training; the others are the test.
        partition: how nodes are dealt to ranks: by number ("contiguous"), by most neighbours
            ("greedy"), or by METIS ("metis", package pymetis).
        model: "gcn", graph convolutions, or "sage", GraphSAGE with means.
        layers: the number of layers; each layer but the first one takes rows of other ranks.
        hidden: the width of hidden rows.
        aggregate: what a rank takes of neighbours on other ranks: "exact" rows, no rows ("local"),
            rows of earlier steps ("delayed"), or the means of ranks ("means").
        delay: how many steps late rows arrive, with aggregate=delayed; 0 for exact rows. A step
            exchanges one row of `delay` rows.
    """

    rates: ClassVar[Mapping[str, float]] = {"kfac": 0.01, "sgd": 0.5, "adamw": 0.01}

    epochs: int = bounded(100, ">= 1")
    graph: str = choice("planted", data.GRAPHS)
    planted: data.Planted = field(default_factory=data.Planted)
    known: float = bounded(0.2, "> 0", "< 1")
    partition: str = choice("greedy", partitions.PARTITIONS)
    model: str = choice("gcn", KINDS)
    layers: int = bounded(3, ">= 1")
    hidden: int = bounded(64, ">= 1")
    aggregate: str = choice("exact", aggregates.AGGREGATES)
    delay: int = bounded(5, ">= 0")


class GraphWork(Work):
    """The training of a graph network on the rank's nodes.

    Collective over: comm, as are all methods.

    Raises:
        UserError: a package is missing, a rank would have no node, or a setting cannot work.

    Attributes:
        part: the rank's part of the graph, of exact sums.
        sums: the rank's part in the training.
        trace: seconds and bytes of every stage.
    """

    steps_per_epoch = 1
    measures = ("accuracy",)

    def __init__(
        self, comm: mpikfac.comm.Comm, options: GraphOptions, device: torch.device
    ) -> None:
        with mpikfac.comm.together(comm, "options"):
            graph = data.graph_of(options.graph, options.planted, options.seed)
            nodes = len(graph.labels)
            owners = partitions.dealt(options.partition, graph.edges, nodes, comm.size)
        self._comm, self.examples_per_step = comm, nodes
        self._about = f"{options.model} on {options.graph}, {nodes} nodes"
        self.part, self.sums = (moved(p, device) for p in parts_of(comm.rank, graph, owners, options))
        known = data.split(graph, options.known, options.seed)
        self._places = [self._on(device, known), self._on(device, ~known)]  # training, test
        self._labels = self._on(device, graph.labels)
        share = len(self.part.nodes) / nodes
        self._weight = 1 / (share * known.sum())
        hidden = [options.hidden] * (options.layers - 1)
        widths = [graph.features.shape[1], *hidden, int(graph.labels.max()) + 1]
        model = GraphNetwork(options.model, widths).to(device)
        self.trace = mpikfac.Trace()
        self.trainer = trainer_of(comm, model, options, trace=self.trace)
        group = mpikfac.comm.Group(comm, 0, self.trace, "world")
        exact = aggregates.of_all(self.part, aggregates.in_time(group, self.part), share)
        ...
