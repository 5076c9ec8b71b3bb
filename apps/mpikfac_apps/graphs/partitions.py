"""Distribute the nodes of a graph over ranks, with few edges between nodes of different ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mpikfac_apps.graphs.data import Graph, Places, package

PASSES = 10
SLACK = 1.05  # the maximum size of a part, relative to parts of equal size


def contiguous(_: Places, nodes: int, parts: int) -> Places:
    """Return the part of each node; parts are ranges of nodes whose sizes differ by at most 1."""
    return np.arange(nodes) * parts // nodes


def greedy(edges: Places, nodes: int, parts: int) -> Places:
    """Assign each node to the part with most of its neighbours, if there is room in it.

    A neighbour counts less the fuller its part is [Stanton & Kliot 2012]. The nodes are visited
    several times in breadth-first order: a neighbour that comes later in the order counts for the
    part to which the previous pass assigned it [Nishimura & Ugander 2013].
    """
    neighbours = _neighbours(edges, nodes)
    order = _breadth_first(neighbours)
    room = math.ceil(SLACK * nodes / parts)
    owners = np.full(nodes, parts)  # not assigned yet
    for _ in range(PASSES):
        sizes = np.zeros(parts)
        for node in order:
            counts = np.bincount(owners[neighbours[node]], minlength=parts + 1)[:parts]
            scores = np.where(sizes < room, counts * (1 - sizes / room), -1)
            owners[node] = np.lexsort((sizes, -scores))[0]
            sizes[owners[node]] += 1
    return owners


def metis(edges: Places, nodes: int, parts: int) -> Places:
    """Return the part of each node, as computed by METIS [Karypis & Kumar 1998].

    Raises:
        ValueError: pymetis is not installed.
    """
    graph = _neighbours(edges, nodes)
    return np.array(package("pymetis").part_graph(parts, graph)[1], np.intp)


def _neighbours(edges: Places, nodes: int) -> list[Places]:
    """Return the neighbours of each node."""
    rows, columns = np.concatenate([edges, edges[::-1]], axis=1)
    order = np.argsort(rows, kind="stable")
    return np.split(columns[order], np.cumsum(np.bincount(rows, minlength=nodes))[:-1])


def _breadth_first(neighbours: Sequence[Places]) -> list[int]:
    """Return the nodes in breadth-first order: a node, its neighbours, their neighbours, ..."""
    order: dict[int, None] = {}
    for start in range(len(neighbours)):
        reached = [] if start in order else [start]
        order.setdefault(start)
        for node in reached:  # `reached` grows inside the loop
            fresh = [near for near in neighbours[node].tolist() if near not in order]
            order |= dict.fromkeys(fresh)
            reached += fresh
    return list(order)


PARTITIONS: dict[str, Callable[[Places, int, int], Places]] = {
    "contiguous": contiguous,
    "greedy": greedy,
    "metis": metis,
}


def dealt(name: str, graph: Graph, parts: int) -> Places:
    """Return the part of each node of a graph, for a partition given by name.

    Raises:
        ValueError: a part has no node, or a package is not installed.
    """
    nodes = len(graph.labels)
    owners = PARTITIONS[name](graph.edges, nodes, parts)
    if empty := np.flatnonzero(np.bincount(owners, minlength=parts) == 0).tolist():
        raise ValueError(
            f"partition={name} leaves ranks {empty} without a node: the graph has {nodes} nodes; "
            f"use fewer ranks than {parts}, or another partition"
        )
    return owners


def crossing(edges: Places, owners: Places) -> int:
    """Return the number of edges between nodes of different parts."""
    return int((owners[edges[0]] != owners[edges[1]]).sum())
