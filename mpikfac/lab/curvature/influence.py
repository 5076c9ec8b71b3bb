"""Influence functions: how the loss of a query changes if a training example is left out.

To first order, leaving out example t of N raises the loss of query q by
`g_q^T (C + damping I)^-1 g_t / N`, with the gradients g of their losses and the curvature C
[Koh & Liang 2017]. With the factors of K-FAC or EKFAC, it scales to large networks
[Grosse et al. 2023].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mpikfac.lab.curvature.curvature import USUAL, Curvature, damped_power
from mpikfac.lab.curvature.records import Losses, Records, gradients, products, record
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

    A positive score means that the example helps: the loss of the query would rise without it.

    Collective over: comm of the curvature. Each rank passes its own examples and queries, of any
    number.

    Args:
        losses: returns the training loss of each example, for example
            `lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")`.
        examples: batches of the rank's training examples, without augmentation.
        queries: a batch of the rank's queries; the solutions take 8 bytes per parameter and query
            of all ranks.
        damping: see `Curvature.solve`.
        measure: returns the loss of each query, if it is not the training loss.

    Returns:
        Scores `[queries, examples]` in float64: the queries of all ranks, in the order of ranks,
        and the examples of this rank.

    Raises:
        ValueError: see `record`: modules in training mode, or a loss of several examples.
    """
    solved = _solved(curvature, measure or losses, queries, damping)
    scores = [_scores(curvature, solved, losses, batch) for batch in examples]
    count = next(iter(solved.values())).shape[0]
    own = torch.cat([torch.empty(count, 0, dtype=torch.float64), *scores], 1)
    return own / sum(curvature.owners.count(own.shape[1]))


def self_influence(
    curvature: Curvature,
    losses: Losses,
    examples: Iterable[Any],
    damping: float | Damping = USUAL,
) -> Tensor:
    """Return how much each example lowers its own loss, without the division by N; `[examples]`.

    Wrong labels are often among the largest values. The eigenbases of all layers are sent to every
    rank, and the examples stay on their ranks.

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
        total = torch.zeros(_length(records), dtype=torch.float64)
        for name, layer in curvature.layers.items():  # one layer's gradients at a time
            matrices = gradients(layer, records[name], len(total))
            solved = everywhere.bases[name].apply(function, matrices)
            total += (matrices * solved).flatten(1).sum(1).cpu()
        found.append(total)
    return torch.cat(found)


def _solved(
    curvature: Curvature, losses: Losses, queries: Any, damping: float | Damping
) -> dict[str, Tensor]:
    """Return `(C + damping I)^-1 g` for the queries of all ranks, as matrices by layer."""
    records, shapes = _records(curvature, losses, queries), curvature.owners.shapes
    count = _length(records)
    matrices = {n: gradients(la, records[n], count) for n, la in curvature.layers.items()}
    solved = curvature.apply_to_matrices(matrices, damped_power(-1.0, damping))
    return {
        n: curvature.owners.gather(m.flatten(1)).view(-1, *shapes[n]) for n, m in solved.items()
    }


def _scores(curvature: Curvature, solved: dict[str, Tensor], losses: Losses, batch: Any) -> Tensor:
    """Return products of solved queries with the gradients of a batch, `[queries, examples]`."""
    records = _records(curvature, losses, batch)
    total = sum(products(solved[name], calls) for name, calls in records.items())
    assert isinstance(total, Tensor)
    return total.cpu()


def _records(curvature: Curvature, losses: Losses, batch: Any) -> Records:
    return record(curvature.model, list(curvature.layers.values()), losses, batch)


def _length(records: Records) -> int:
    """Return the number of examples of a batch."""
    return max((call.g.shape[1] for calls in records.values() for call in calls), default=0)
