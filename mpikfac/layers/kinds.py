"""Map classes of modules, or their full names, to the kinds of layers that cover them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mpikfac.layers.convolution.layer import ConvLayer
from mpikfac.layers.embedding import EmbeddingLayer
from mpikfac.layers.inner import CellLayer, ProjectionLayer, attention_layers, cell_layers
from mpikfac.layers.layer import Layer
from mpikfac.layers.normalization import NormLayer
from mpikfac.layers.transposed import TransposedLayer

Maker = Callable[[str, Any], Layer | list[Layer]]
Kinds = Mapping[type[nn.Module] | str, Maker]

KINDS: Kinds = {
    nn.Linear: Layer,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvLayer),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ConvLayer),
    nn.Embedding: EmbeddingLayer,
    nn.MultiheadAttention: attention_layers,
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), cell_layers),
    # From packages that mpikfac does not import.
    "transformers.pytorch_utils.Conv1D": TransposedLayer,
    "timm.layers.linear.Linear": Layer,
}
"""The modules covered by default. Modules of derived classes are not covered, because they can
compute something else."""

NORMS: Kinds = dict.fromkeys(
    (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    ),
    NormLayer,
)
"""Normalisation layers, for `covers={**KINDS, **NORMS}`."""


SIDE_BY_SIDE = {Layer, TransposedLayer, ProjectionLayer, CellLayer, ConvLayer}
"""Classes of layers whose moments of a side depend only on that side's tensor, so the moments of
layers with the same `form` can be computed together, as those of the groups of one layer. Derived
classes are left out, because they can compute something else."""


def maker_of(module: nn.Module, covers: Kinds) -> Maker | None:
    """Return the function that creates a module's layers; None if its class is not covered."""
    kind = class_of(module)
    return covers.get(kind) or covers.get(f"{kind.__module__}.{kind.__qualname__}")


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the module's class or, after `fully_shard`, the class that the module had before."""
    kind = type(module)
    sharded = kind.__bases__[0].__name__ == "FSDPModule"
    original: type[nn.Module] = kind.__bases__[1] if sharded else kind
    return original


# -- derived classes -----------------------------------------------------------------------------

NEVER_CALLED = (NonDynamicallyQuantizableLinear,)  # attention only reads its weight


def same_as(module: nn.Module, covers: Kinds) -> bool:
    """Return whether an uncovered module inherits all its computations from a covered class."""
    kind = class_of(module)
    base = covered_base(kind, covers)
    if base is None or maker_of(module, covers) or kind in NEVER_CALLED:
        return False
    return not any(_changes(part, base) for part in kind.__mro__[: kind.__mro__.index(base)])


def offer(kind: type[nn.Module], covers: Kinds) -> str:
    """State which `KFAC` argument covers `kind`, which computes the same as a covered class."""
    base, derived = covered_base(kind, covers), kind.__name__
    assert base is not None
    (table, *_) = [name for name, kinds in (("KINDS", KINDS), ("NORMS", NORMS)) if base in kinds]
    same = f"mpikfac.{table}[torch.nn.{base.__name__}]"
    choice = f"coverage=mpikfac.Coverage(covers={{**mpikfac.KINDS, {derived}: {same}}})"
    return f"{choice} covers {derived}"


def covered_base(kind: type[nn.Module], covers: Kinds) -> type[nn.Module] | None:
    """Return the nearest covered torch class from which a class is derived."""
    covered = {*KINDS, *NORMS}.intersection(covers)
    return next((base for base in kind.__mro__[1:] if base in covered), None)


def _changes(kind: type, base: type) -> bool:
    """Return whether a class can change what the methods of a base class compute."""
    harmless = {"__init__", "__module__", "__doc__", "__repr__", "extra_repr", "reset_parameters"}
    return any(
        isinstance(value, property) or (callable(value) and hasattr(base, name))
        for name, value in vars(kind).items()
        if name not in harmless
    )
