"""Influence functions: how the loss of a query changes if a training example is left out.

To first order, leaving out example t of N raises the loss of query q by
`g_q^T (C + damping I)^-1 g_t / N`, where g denotes the gradients of the two losses, and C is the
curvature [Koh & Liang 2017]. With the factors of K-FAC or EKFAC, this scales to large networks
[Grosse et al. 2023].
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import MAX_COUNT
from mpikfac.errors import UserError
from mpikfac.lab.curvature.curvature import USUAL, Curvature, damped_power
from mpikfac.lab.curvature.owners import ITEMSIZE, Owners
from mpikfac.lab.curvature.records import (
    Losses,
    Records,
    gradients,
    products,
    record,
    weighted_squares,
)
from mpikfac.settings import Damping


def influence(
    curvature: Curvature,
    losses: Losses,
    examples: Iterable[Any],
    queries: Any,
    damping: float | Damping = USUAL,
    *,
    measure: Losses | None = None,
) -> Tensor:
    """Return how much each training example lowers the loss of each query, to first order.

        scores = mpikfac.lab.influence(curvature, losses, batches, queries)
        helpful = scores[0].topk(10).indices  # for the first query

    A positive score means that the example helps: without it, the query's loss would be higher.

    Collective over: comm of the curvature. Each rank passes any number of its own examples and
    queries.

    Args:
        losses: returns the training loss of each example, for example
            `lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")`.
        examples: batches of the rank's training examples, without augmentation.
        queries: a batch of the rank's queries; each takes 40 bytes of memory per parameter on its
            rank, and 8 bytes on every other rank.
        damping: see `Curvature.solve`.
        measure: returns the loss of each query; None for the training loss.

    Returns:
        Scores `[queries, examples]` in float64, for the queries of all ranks, in rank order, and
        the examples of this rank.

    Raises:
        ValueError: a module is in training mode, or `losses` or `measure` does not return one loss
            per example.
        UserError: the solutions for all queries do not fit into memory or into a message; the
            error message states how many queries would fit.
    """
    gradients_of = query_gradients(curvature, measure or losses, queries)
    solved = curvature.apply_to_matrices(gradients_of, damped_power(-1.0, damping))
    return inner_products(curvature, solved, losses, examples)


def self_influence(
    curvature: Curvature,
    losses: Losses,
    examples: Iterable[Any],
    damping: float | Damping = USUAL,
) -> Tensor:
    """Return how much each example lowers its own loss, times the number of examples.

    The result has the shape `[examples]`. Mislabelled examples often have the largest values. The
    eigenbases of all layers are sent to every rank, and the examples stay on their ranks.

    Collective over: comm of the curvature.

    Args:
        losses: see `influence`.
        examples: see `influence`.
        damping: see `Curvature.solve`.
    """
    everywhere, function = curvature.replicate(), damped_power(-1.0, damping)
    found = [torch.empty(0, dtype=torch.float64)]
    for batch in examples:
        records = _records(curvature, losses, batch)
        length = _length(records)
        total = torch.zeros(length, dtype=torch.float64)
        for name, layer in curvature.layers.items():  # one layer's gradients at a time
            basis, calls = everywhere.bases[name], records[name]
            inverses = function(basis.values)[None]
            none = [None] * len(calls)
            total += weighted_squares(basis, layer, calls, length, none, inverses)[0].cpu()
        found.append(total)
    return torch.cat(found)


def query_gradients(curvature: Curvature, losses: Losses, queries: Any) -> dict[str, Tensor]:
    """Return the gradients of this rank's queries as matrices, by layer.

    Collective over: comm of the curvature.

    Raises:
        UserError: the queries of all ranks do not fit into memory or into a message.
    """
    records = _records(curvature, losses, queries)
    count = _length(records)
    _check_size(curvature.owners, count)
    return {n: gradients(layer, records[n], count) for n, layer in curvature.layers.items()}


def inner_products(
    curvature: Curvature, matrices: Mapping[str, Tensor], losses: Losses, examples: Iterable[Any]
) -> Tensor:
    """Return the inner products of all ranks' vectors with the gradients of this rank's examples.

    Collective over: comm of the curvature.

    Args:
        matrices: this rank's vectors, `[vectors, groups, outputs, inputs]` by layer.

    Returns:
        Products `[vectors, examples]`, divided by the number of examples on all ranks.
    """
    owners = curvature.owners
    counts = owners.integers(len(next(iter(matrices.values()))))
    everyone = {
        name: owners.gather(rows.flatten(1), counts).view(-1, *owners.shapes[name])
        for name, rows in matrices.items()
    }
    found = [torch.empty(sum(counts), 0, dtype=torch.float64)]
    for batch in examples:
        records = _records(curvature, losses, batch)
        length = _length(records)
        of_layers = [products(everyone[n], calls, length) for n, calls in records.items()]
        found.append(torch.stack(of_layers).sum(0).cpu())
    own = torch.cat(found, 1)
    return own / sum(owners.integers(own.shape[1]))


def _check_size(owners: Owners, queries: int) -> None:
    """Check that the queries of all ranks fit into memory and into messages.

    A rank stores its queries' gradients and solutions, the buffers in which these are sent to the
    owners and back, and the solutions of all ranks.

    Collective over: comm of the owners.

    Raises:
        UserError: the queries do not fit; raised on all ranks.
    """
    counts, parameters = owners.integers(queries), sum(owners.sizes)
    memory = min(owners.integers(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    needed = ITEMSIZE * parameters * (4 * max(counts) + sum(counts))
    elements = max(parameters * max(counts), max(owners.sizes) * sum(counts))  # per message
    if needed > memory or (len(counts) > 1 and elements > MAX_COUNT):
        most = sum(counts) * min(memory * elements, MAX_COUNT * needed) // (needed * elements)
        raise UserError(
            f"{sum(counts)} queries with {parameters:,} parameters need {needed:,} bytes of memory "
            f"on each rank, which has {memory:,}, and messages of {elements:,} elements, where the "
            f"maximum is {MAX_COUNT:,}; pass at most {most} at a time"
        )


def _records(curvature: Curvature, losses: Losses, batch: Any) -> Records:
    return record(curvature.model, list(curvature.layers.values()), losses, batch)


def _length(records: Records) -> int:
    """Return the number of examples in a batch."""
    return max((len(call.g) for calls in records.values() for call in calls), default=0)
