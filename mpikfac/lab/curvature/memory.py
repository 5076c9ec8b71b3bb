"""Plan the memory that influence functions and Laplace approximations take on a rank.

Sizes of eigenbases and of vectors follow from the shapes of layers. Those of a pass depend on the
network, and are taken from a pass over a single example. The memory of messages is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.lab.curvature.curvature import Curvature
from mpikfac.lab.curvature.owners import ITEMSIZE
from mpikfac.lab.curvature.records import (
    ELEMENTS,
    Losses,
    Outputs,
    RecordedCall,
    Records,
    record,
    record_columns,
    rotated_elements,
)

Parts = dict[str, int]
"""Bytes by what they store."""
MATRICES = 4
"""Gradients of a layer that exist at a time: their sum, a call's, and two sides of a rotation."""


def influence_memory(
    curvature: Curvature, losses: Losses, example: Any, examples: int, queries: int
) -> dict[str, Parts]:
    """Return the bytes that a rank needs for `influence` and for `self_influence`, by part.

    They are in addition to the curvature and the model.

    Collective over: comm of the curvature.

    Args:
        losses: see `influence`.
        example: a batch of one of the rank's training examples, or an empty one.
        examples: the largest number of training examples in a batch.
        queries: the number of the rank's queries.

    Raises:
        ValueError: see `influence`.
    """
    with _saved(curvature.model) as saved:
        records = record(curvature.model, list(curvature.layers.values()), losses, example)
    calls, examples = _calls(records), max(examples, queries)
    kept = {_storage(t): t.nbytes for call in calls for t in (call.x, call.g)}
    after = examples * sum(kept.values()) + _temporary(calls, examples)
    batch = max(examples * sum({**saved, **kept}.values()), after)
    owners = curvature.owners
    everyone = sum(owners.integers(queries)) if len(owners.names) > 1 else 0
    vectors = ITEMSIZE * sum(owners.sizes) * (2 * queries + everyone)  # gradients and solutions
    return {
        "influence": {"queries": vectors, "batch": batch},
        "self-influence": {"eigenbases": _bases(curvature), "batch": batch},
    }


def variances_memory(
    curvature: Curvature, outputs: Outputs, example: Any, examples: int, priors: int
) -> Parts:
    """Return the bytes that a rank needs for `output_variances`, by part.

    They are in addition to the curvature and the model.

    Collective over: comm of the curvature.

    Args:
        curvature: with the layers divided over the ranks, before `replicate`.
        outputs: see `output_variances`.
        example: a batch of one of the rank's examples, or an empty one.
        examples: the largest number of examples in a batch.
        priors: the number of priors.

    Raises:
        ValueError: see `output_variances`.
    """
    layers = list(curvature.layers.values())
    with _saved(curvature.model) as saved:
        passes = record_columns(curvature.model, layers, outputs, example, lambda y: iter([y]))
        calls = _calls(next(passes)[1])
    kept = {_storage(t): t.nbytes for call in calls for t in (call.x, call.g)}
    rotated = ITEMSIZE * sum(rotated_elements(call, examples) for call in calls)
    largest = max(map(math.prod, curvature.owners.shapes.values()))
    return {
        "eigenbases": _bases(curvature),
        "batch": examples * sum({**saved, **kept}.values()) + rotated + _temporary(calls, examples),
        "priors": 2 * priors * ITEMSIZE * largest,
    }


def _bases(curvature: Curvature) -> int:
    """Return the bytes of a copy of the eigenbases of all layers."""
    own = sum(t.nbytes for basis in curvature.bases.values() for t in basis.parts().values())
    return sum(curvature.owners.integers(own))


def _calls(records: Records) -> list[RecordedCall]:
    return [call for of_layer in records.values() for call in of_layer]


def _temporary(calls: list[RecordedCall], examples: int) -> int:
    """Return the bytes that the layer with the largest gradients needs for them; see `parts`."""

    def of_layer(call: RecordedCall) -> int:
        shape = call.layer.shape
        gradient = shape.groups * shape.outputs * shape.inputs
        at_a_time = min(examples, max(1, ELEMENTS // max(call.elements, gradient)))
        return at_a_time * (call.x.numel() + call.elements + MATRICES * gradient)

    return ITEMSIZE * max(map(of_layer, calls), default=0)


@contextmanager
def _saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the bytes, by storage, of tensors that autograd keeps, without those of the model."""
    constant = {_storage(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := _storage(tensor)) not in constant:
            found[storage] = max(found.get(storage, 0), tensor.nbytes)
        return tensor.detach()  # the tensor itself can be an output, which would keep itself

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
