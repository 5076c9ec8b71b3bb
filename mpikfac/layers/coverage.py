"""Choose the modules of a model that K-FAC covers, the kinds of layers, and uncovered tensors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mpikfac.layers.attention import attention_layers
from mpikfac.layers.convolution.layer import ConvLayer
from mpikfac.layers.embedding import EmbeddingLayer
from mpikfac.layers.layer import Layer
from mpikfac.layers.normalization import NormLayer
from mpikfac.layers.uncovered import Other, Statistic, Votes
from mpikfac.plan import LayerShape, Shape, usual_rule

Kinds = Mapping[type[nn.Module], Callable[[str, Any], Layer | list[Layer]]]
Rule = Callable[[LayerShape], LayerShape]

KINDS: Kinds = {
    nn.Linear: Layer,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvLayer),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ConvLayer),
    nn.Embedding: EmbeddingLayer,
    nn.MultiheadAttention: attention_layers,
}
"""The kinds of modules covered by default. Modules of a derived class are not covered: a derived
class may compute something else."""

NORMS: Kinds = dict.fromkeys(
    (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    ),
    NormLayer,
)
"""Normalisations, for `covers={**KINDS, **NORMS}`."""


@dataclass(frozen=True)
class Coverage:
    """Choose the layers that K-FAC covers, and the form of the factors.

    Args:
        skip: names of modules to train first-order, with all modules inside.
        covers: the kind of layer for each type of module. `KINDS`: linear layers, convolutions,
            embeddings and attention. `{**KINDS, **NORMS}`: normalisations, too. Modules of your own
            are added in the same way, see `layers`.
        rule: maps the whole factors of a layer to the kept factors: only diagonals or blocks, or
            only one side; how positions that share a weight count; the layer's solver, if different
            from the run's solver.

    Raises:
        ValueError: `skip` is a text and no sequence of names.
    """

    skip: Sequence[str] = ()
    covers: Kinds = field(default_factory=lambda: KINDS)
    rule: Rule = usual_rule

    def __post_init__(self) -> None:
        if isinstance(self.skip, str):
            raise ValueError(f"skip={self.skip!r} must be a sequence of names; try [{self.skip!r}]")


def cover(
    model: nn.Module,
    coverage: Coverage | None = None,
    statistics_dtype: torch.dtype | None = None,
) -> tuple[list[Layer], list[Other]]:
    """Return the covered layers, and uncovered trained tensors and statistics, in model order.

    Modules of the types in `covers` are covered, except modules without trained parameters, and
    modules named in `skip` or inside a module named in `skip`. Modules with the same parameters are
    a single layer.

    Args:
        statistics_dtype: inputs of convolutions are rounded to this dtype before multiplying.

    Raises:
        ValueError: a layer cannot be covered exactly, or no module has a name in `skip`.
    """
    coverage = coverage or Coverage()
    skip, covers = tuple(coverage.skip), coverage.covers
    _check_skip(model, skip)
    layers: list[Layer] = []
    covering: dict[int, Layer] = {}  # by parameter
    for name, module in model.named_modules():
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        skipped = any(name == s or name.startswith(f"{s}.") for s in skip)
        if type(module) not in covers or not trained or skipped:
            continue
        if (first := covering.get(id(trained[0]))) and alike(first.module, module):
            first.modules.append(module)
            continue
        made = covers[type(module)](name, module)
        for layer in made if isinstance(made, list) else [made]:
            layer.rounded_to = statistics_dtype
            layer.shape = _ruled(coverage.rule, layer.shape)
            layers.append(layer)
            covering |= {id(parameter): layer for parameter in layer.parameters}
    _check_shared(model, layers)
    return layers, find_uncovered(model, covering)


def _ruled(rule: Rule, whole: LayerShape) -> LayerShape:
    """Return the shape that the rule keeps of a layer.

    Raises:
        ValueError: the rule keeps something that the layer does not have.
    """
    kept = rule(whole)
    same = ("name", "inputs", "outputs", "groups")
    changed = [field for field in same if getattr(kept, field) != getattr(whole, field)]
    if not kept.sides or not set(kept.sides) <= set(whole.sides):
        changed.append("sides")
    if kept.rescaled and not whole.rescaled:
        changed.append("rescaled")
    if changed:
        field = changed[0]
        raise ValueError(
            f"the rule makes {field}={getattr(kept, field)!r} of layer {whole.name!r}, which has "
            f"{getattr(whole, field)!r}"
        )
    return kept


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules compute the same output from the same input."""
    shared = list(map(id, one.parameters())) == list(map(id, other.parameters()))
    return shared and (type(one), one.extra_repr()) == (type(other), other.extra_repr())


def find_uncovered(model: nn.Module, covered: Collection[int] = ()) -> list[Other]:
    """Return trained parameters whose `id` is not in `covered`, and all running statistics.

    Raises:
        ValueError: a layer has sparse gradients.
    """
    others = [
        Other(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered
    ]
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ValueError(f"layer {name!r} has sparse gradients; make it with sparse=False")
        if isinstance(module, (_BatchNorm, _InstanceNorm)):
            buffers = module.named_buffers(name, recurse=False)
            count = module.num_batches_tracked
            others += [Statistic(n, b, count) for n, b in buffers if b.is_floating_point()]
    return others


def covered_shapes(
    model: nn.Module, coverage: Coverage | None = None
) -> tuple[list[LayerShape], list[tuple[str, Shape]]]:
    """Return a model's layer shapes, and names and shapes of uncovered tensors, for `make_plan`."""
    layers, others = cover(model, coverage)
    others.append(Votes(torch.float32, torch.device("cpu")))
    return [layer.shape for layer in layers], [(o.name, tuple(o.tensor.shape)) for o in others]


def _check_skip(model: nn.Module, skip: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_modules()]
    for name in skip:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"skip names {name!r}, which is no module of the model{hint}")


def _check_shared(model: nn.Module, layers: list[Layer]) -> None:
    """Raise ValueError if a layer misses a use of its parameters: a gradient sums over all uses."""
    holders: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), {})[name] = module
    for layer in layers:
        own = {part for module in layer.modules for part in module.modules()}
        for parameter in layer.parameters:
            held = holders[id(parameter)]
            if not own.issuperset(held.values()):
                raise ValueError(
                    f"layers {' and '.join(map(repr, held))} share a parameter but are not alike, "
                    f"which is not covered; add {layer.name!r} to skip to train it first-order"
                )
