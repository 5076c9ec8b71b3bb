"""Predict the memory that influence functions and Laplace approximations need on a rank.

The sizes of eigenbases and vectors follow from the layers' shapes. The memory of a pass depends on
the network, and is measured in a pass over a few examples. Memory for messages is not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    single_products,
)

Parts = dict[str, int]
"""Numbers of bytes, by what the bytes store."""
ROTATED = 4
"""How many gradients are in memory while they are rotated: a sum over calls, the gradients of one
call, and their products with the eigenvectors of one side and of both sides."""


def influence_memory(
    curvature: Curvature, losses: Losses, few: Any, examples: int, queries: int
) -> dict[str, Parts]:
    """Return the number of bytes that a rank needs for `influence` and `self_influence`, by use.

    The memory of the curvature and the model is not included.

    Collective over: comm of the curvature.

    Args:
        losses: see `influence`.
        few: a batch with a few of the rank's training examples, or with none.
        examples: the largest number of training examples in a batch.
        queries: the number of the rank's queries.

    Raises:
        ValueError: see `influence`.
    """
    owners, largest, bases = curvature.owners, max(examples, queries), _bases(curvature)
    everyone = sum(owners.integers(queries))  # communicate before the pass, which may fail
    with _saved(curvature.model) as saved:
        records = record(curvature.model, list(curvature.layers.values()), losses, few)
    graph, kept = _of_pass(saved, records)
    vectors = 2 * queries + everyone  # gradients and solutions, then the solutions of all ranks
    layers = [calls for calls in records.values() if calls]
    products = max((_of_layer(calls, largest, everyone) for calls in layers), default=0)
    rotated = max((_of_layer(c, examples) + 2 * _gradient(c) for c in layers), default=0)
    return {
        "influence": {
            "queries": ITEMSIZE * sum(owners.sizes) * vectors,
            "batch": max(graph * largest, kept * largest + ITEMSIZE * products),
        },
        "self-influence": {
            "eigenbases": bases,
            "batch": max(graph * examples, kept * examples + ITEMSIZE * rotated),
        },
    }


def variances_memory(
    curvature: Curvature, outputs: Outputs, few: Any, examples: int, priors: int
) -> Parts:
    """Return the number of bytes that a rank needs for `output_variances`, by use.

    The memory of the curvature and the model is not included.

    Collective over: comm of the curvature.

    Args:
        curvature: the curvature before `replicate`, with layers distributed over the ranks.
        outputs: see `output_variances`.
        few: a batch with a few of the rank's examples, or with none.
        examples: the largest number of examples in a batch.
        priors: the number of priors.

    Raises:
        ValueError: see `output_variances`.
    """
    layers, bases = list(curvature.layers.values()), _bases(curvature)
    with _saved(curvature.model) as saved:
        passes = record_columns(curvature.model, layers, outputs, few, lambda y: iter([y]))
        _, records = next(passes)
    graph, _ = _of_pass(saved, records)
    rotated = sum(rotated_elements(call, examples) for c in records.values() for call in c)

    def of_layer(name: str, calls: Sequence[RecordedCall]) -> int:
        groups, outputs, inputs = curvature.owners.shapes[name]
        rows = outputs + (examples if single_products(calls) else 0)
        return _of_layer(calls, examples) + 2 * priors * groups * rows * inputs

    layer = max((of_layer(name, calls) for name, calls in records.items() if calls), default=0)
    return {
        "eigenbases": bases,
        "batch": graph * examples + ITEMSIZE * rotated,
        "layer": ITEMSIZE * layer,
    }


def _bases(curvature: Curvature) -> int:
    """Return the number of bytes in a copy of all layers' eigenbases."""
    own = sum(t.nbytes for basis in curvature.bases.values() for t in basis.parts().values())
    return sum(curvature.owners.integers(own))


def _of_pass(saved: dict[int, int], records: Records) -> tuple[int, int]:
    """Return the bytes per example in memory up to the end of a backward pass, and after it."""
    calls = [call for of_layer in records.values() for call in of_layer]
    kept = {_storage(tensor): tensor.nbytes for call in calls for tensor in (call.x, call.g)}
    examples = max((len(call.g) for call in calls), default=1)
    before, after = sum({**saved, **kept}.values()), sum(kept.values())
    return math.ceil(before / examples), math.ceil(after / examples)


def _gradient(calls: Sequence[RecordedCall]) -> int:
    """Return the number of elements of the called layer's gradient."""
    shape = calls[0].layer.shape
    return shape.groups * shape.outputs * shape.inputs


def _of_layer(calls: Sequence[RecordedCall], examples: int, queries: int | None = None) -> int:
    """Return how many elements a layer's gradients need in memory at a time; see `records.parts`.

    Args:
        queries: the number of queries whose products with the gradients are computed; None if the
            gradients are rotated.
    """
    shape, gradient = calls[0].layer.shape, _gradient(calls)
    inputs = max(call.x.numel() // len(call.g) for call in calls)
    vectors = max(call.elements // len(call.g) for call in calls)
    if queries is not None and all(call.positions == len(call.g) for call in calls):
        mapped = 2 * shape.groups * shape.outputs * examples  # matrices times inputs, and a copy
        return examples * (inputs + 2 * vectors) + queries * max(gradient, mapped)
    if queries is None and single_products(calls):  # gradients are not computed
        return examples * (inputs + 2 * vectors)
    at_a_time = min(examples, max(1, ELEMENTS // max(vectors, gradient)))
    if queries is not None:
        return at_a_time * (inputs + 2 * vectors + gradient)
    return at_a_time * max(inputs + 2 * (vectors + gradient), ROTATED * gradient)


@contextmanager
def _saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the sizes in bytes, by storage, of the tensors that autograd saves.

    The model's parameters and buffers, and sparse tensors, are left out.
    """
    constant = {_storage(t) for t in (*model.parameters(), *model.buffers()) if _has_storage(t)}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _has_storage(tensor) and (storage := _storage(tensor)) not in constant:
            found[storage] = max(found.get(storage, 0), tensor.nbytes)
        return tensor.detach()  # if the tensor is an output, its graph must not refer to itself

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
