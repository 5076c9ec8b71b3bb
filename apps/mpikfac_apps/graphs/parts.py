"""Sums over neighbours on one rank: matrices for own rows, received rows, and rows to send."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpikfac_apps.graphs.data import Numbers, Places


class Weights(NamedTuple):
    """The nonzero elements of the matrix that maps the rows of nodes to sums over neighbours."""

    rows: Places
    columns: Places
    values: Numbers


class GraphPart(NamedTuple):
    """The part of a graph that a rank stores.

    Attributes:
        own: the weights of the rank's own rows in the sums over neighbours; sparse, `[own, own]`.
        halo: the weights of the rows that other ranks send; sparse, `[own, received]`.
        sent: maps the rank's own rows to the rows to send, sorted by receiver; sparse,
            `[sent, own]`.
        counts_out: the number of rows to send to each rank.
        counts_in: the number of rows received from each rank.
    """

    own: Tensor
    halo: Tensor
    sent: Tensor
    counts_out: list[int]
    counts_in: list[int]

    def to(self, device: torch.device) -> GraphPart:
        """Return this part of a graph with its tensors on `device`."""
        own, halo, sent = (tensor.to(device) for tensor in (self.own, self.halo, self.sent))
        return self._replace(own=own, halo=halo, sent=sent)


def of_convolution(edges: Places, nodes: int) -> Weights:
    """Return the weights of a graph convolution [Kipf & Welling 2017].

    A node with `d` neighbours counts as its own neighbour, and weights a neighbour that has `e`
    neighbours by `1 / sqrt((d + 1) (e + 1))`.
    """
    loops = np.arange(nodes)
    rows, columns = (np.concatenate([a, b, loops]) for a, b in (edges, edges[::-1]))
    roots = np.sqrt(np.bincount(rows, minlength=nodes))
    return Weights(rows, columns, 1 / (roots[rows] * roots[columns]))


def of_means(edges: Places, nodes: int) -> Weights:
    """Return the weights of means over neighbours [Hamilton et al. 2017]."""
    rows, columns = np.concatenate([edges, edges[::-1]], axis=1)
    return Weights(rows, columns, 1 / np.bincount(rows, minlength=nodes)[rows])


def inside(edges: Places, owners: Places) -> Places:
    """Return the edges between nodes of the same rank."""
    return edges[:, owners[edges[0]] == owners[edges[1]]]


def part_of(rank: int, owners: Places, weights: Weights) -> GraphPart:
    """Return a rank's part of the sums over neighbours.

    The rank receives one row for each node of another rank that contributes to its sums.

    Args:
        owners: the rank that owns each node, `[nodes]`.
    """
    nodes, ranks = len(owners), owners.max() + 1
    rows, columns, values = weights
    of_rank = np.flatnonzero(owners == rank)
    places = np.zeros(nodes, np.intp)  # indices among own nodes, or among received nodes
    places[of_rank] = np.arange(len(of_rank))
    # Distinct pairs of a receiver and a node, sorted by receiver and then by node.
    leaving = owners[rows] != owners[columns]
    pairs = np.unique(owners[rows[leaving]] * nodes + columns[leaving])
    receivers, sent = pairs // nodes, pairs % nodes
    received = sent[receivers == rank]
    received = received[np.argsort(owners[received], kind="stable")]
    places[received] = np.arange(len(received))
    outgoing = owners[sent] == rank
    mine, near = owners[rows] == rank, owners[columns] == rank

    def cut(chosen: np.ndarray, width: int) -> Tensor:
        shape = len(of_rank), width
        return sparse(places[rows[chosen]], places[columns[chosen]], values[chosen], shape)

    chosen = places[sent[outgoing]]
    return GraphPart(
        cut(mine & near, len(of_rank)),
        cut(mine & ~near, len(received)),
        sparse(np.arange(len(chosen)), chosen, np.ones(len(chosen)), (len(chosen), len(of_rank))),
        np.bincount(receivers[outgoing], minlength=ranks).tolist(),
        np.bincount(owners[received], minlength=ranks).tolist(),
    )


def with_means(part: GraphPart) -> GraphPart:
    """Return a part of a graph that sends the mean of its rows instead of individual rows.

    A rank sends this single row to each rank that owns neighbours of its nodes; the receiver uses
    it in place of each of the sender's rows, as an approximation [Angerd et al. 2020].
    """
    received, sent = (
        sum(count > 0 for count in counts) for counts in (part.counts_in, part.counts_out)
    )
    own, (rows, columns) = len(part.own), part.halo.indices().numpy()
    sources = np.repeat(np.arange(received), [count for count in part.counts_in if count])
    receivers, nodes = np.indices((sent, own), np.intp)
    return part._replace(
        halo=sparse(rows, sources[columns], part.halo.values().numpy(), (own, received)),
        sent=sparse(receivers.ravel(), nodes.ravel(), np.full(sent * own, 1 / own), (sent, own)),
        counts_out=[min(count, 1) for count in part.counts_out],
        counts_in=[min(count, 1) for count in part.counts_in],
    )


def sparse(rows: Places, columns: Places, values: Numbers, shape: tuple[int, int]) -> Tensor:
    """Return a sparse matrix of the default dtype; duplicate entries are summed."""
    numbers = torch.as_tensor(values, dtype=torch.get_default_dtype())
    places = np.stack([rows, columns])
    return torch.sparse_coo_tensor(
        torch.from_numpy(places), numbers, shape, check_invariants=True
    ).coalesce()
