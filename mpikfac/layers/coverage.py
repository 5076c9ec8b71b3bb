"""Select the modules that K-FAC covers, and the form of their factors; find all other tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from mpikfac.layers.kinds import (
    KINDS,
    NEVER_CALLED,
    Kinds,
    class_of,
    covered_base,
    maker_of,
    offer,
    same_as,
)
from mpikfac.layers.layer import Layer, NotCovered
from mpikfac.layers.refusals import Refused, by_reason, check_names
from mpikfac.layers.uncovered import Other, Statistic
from mpikfac.layers.votes import Votes
from mpikfac.plan import LayerShape, Shape, default_rule

Rule = Callable[[LayerShape], LayerShape]
Ties = Mapping[int, Sequence[str]]
"""The names of each shared parameter in all modules that use it, by `id`."""
NAMES = ("skip", "own_examples", "part_of_batch")
"""The arguments of `Coverage` that are sequences of module names."""


@dataclass(frozen=True)
class Coverage:
    """Choose the layers that K-FAC covers, and the form of their factors.

    Args:
        skip: names of modules to train first-order, including all modules inside them.
        covers: the kind of layer that covers each class of modules, by the class or its full name.
            The default, `KINDS`, covers linear layers, convolutions, embeddings, attention and
            recurrent cells. `{**KINDS, **NORMS}` also covers normalisation layers. Add your own
            modules in the same way; see `mpikfac.layers.Layer`.
        rule: a function that maps the shape of a layer with full factors to the shape to use, for
            example with only diagonals, only blocks or only one side; it can also set how positions
            that share a weight are counted, and a preconditioner for this layer.
        own_examples: names of modules, including all modules inside them, for which the first
            dimension of the input is not the batch but any number of other examples, such as boxes
            in images. K-FAC uses these as the layer's examples and does not warn about their
            number. The loss must be a mean over them.
        part_of_batch: names of modules, including all modules inside them, whose calls receive only
            a part of the batch, such as experts, early exits or layers applied to masked tokens.
            The loss must be a mean over the whole batch, whose number of examples is taken from the
            other layers.

    Raises:
        ValueError: a string was passed in place of a sequence of names.
    """

    skip: Sequence[str] = ()
    covers: Kinds = field(default_factory=lambda: KINDS)
    rule: Rule = default_rule
    own_examples: Sequence[str] = ()
    part_of_batch: Sequence[str] = ()

    def __post_init__(self) -> None:
        for choice in NAMES:
            names = getattr(self, choice)
            if isinstance(names, str):
                raise ValueError(f"{choice}={names!r} must be a sequence of names; try [{names!r}]")


def cover(
    model: nn.Module,
    coverage: Coverage | None = None,
    statistics_dtype: torch.dtype | None = None,
) -> tuple[list[Layer], list[Other]]:
    """Return the covered layers, and all uncovered parameters and running statistics.

    Both lists are in model order. Modules of the classes in `coverage.covers` are covered, except
    modules without trained parameters, modules named in `coverage.skip`, and modules inside the
    latter. Modules with the same parameters form a single layer if they compute the same output
    from the same input. Other modules that share a parameter are not covered.

    Args:
        statistics_dtype: the dtype to which inputs of convolutions are rounded before they are
            multiplied; None to leave them unchanged.

    Raises:
        Refused: some modules cannot be covered exactly; the error names all of them.
        ValueError: a name in `skip`, `own_examples` or `part_of_batch` is not that of a module.
    """
    coverage = coverage or Coverage()
    skip, covers = coverage.skip, coverage.covers
    for choice in NAMES:
        check_names(model, choice, getattr(coverage, choice))
    layers: list[Layer] = []
    refused: list[tuple[str, str]] = []
    covering: dict[int, Layer] = {}  # by the parameter's `id`
    for name, module in model.named_modules():
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        make = maker_of(module, covers)
        if make is None or not trained or within(name, skip):
            continue
        if (first := covering.get(id(trained[0]))) and alike(first.module, module):
            first.modules.append(module)
            continue
        try:
            covered = make(name, module)
        except NotCovered as error:
            refused.append((name, str(error)))
            continue
        for layer in covered if isinstance(covered, list) else [covered]:
            layer.path, layer.rounded_to = name, statistics_dtype
            layer.of_part = within(name, coverage.part_of_batch)
            layer.of_batch = not (layer.of_part or within(name, coverage.own_examples))
            layer.shape = _ruled(coverage.rule, layer.shape)
            if layer.of_part:  # EKFAC's scales would need the size of the whole batch
                layer.shape = replace(layer.shape, rescaled=False)
            layers.append(layer)
            covering |= {id(parameter): layer for parameter in layer.parameters}
    if refused:
        raise Refused(by_reason(refused), skip)
    layers, ties = _without_ties(model, layers)
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters}
    return layers, find_uncovered(model, of_layers, ties)


def _without_ties(model: nn.Module, layers: Sequence[Layer]) -> tuple[list[Layer], Ties]:
    """Return the layers that cover all uses of their parameters, and the ties of all others.

    A parameter's gradient is the sum over all its uses: for a weight shared by the embedding and
    the head, it is the sum over both. Factors computed from only some of the uses do not describe
    the parameter's curvature.
    """
    uses: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(name, recurse=False):
            uses.setdefault(id(parameter), {})[own] = module
    kept: list[Layer] = []
    ties: dict[int, Sequence[str]] = {}
    for layer in layers:
        seen = {part for module in layer.modules for part in module.modules()}
        used = {id(parameter): uses[id(parameter)] for parameter in layer.parameters}
        tied = {key: list(use) for key, use in used.items() if not seen.issuperset(use.values())}
        ties |= tied
        if not tied:
            kept.append(layer)
    return kept, ties


def _ruled(rule: Rule, shape: LayerShape) -> LayerShape:
    """Apply the rule to a layer's shape, and return the result.

    Raises:
        ValueError: the rule changes the layer's name, sizes or groups, or sets `sides` or
            `rescaled` to a value that the layer does not support.
    """
    ruled = rule(shape)
    same = ("name", "inputs", "outputs", "groups")
    changed = [field for field in same if getattr(ruled, field) != getattr(shape, field)]
    if not ruled.sides or not set(ruled.sides) <= set(shape.sides):
        changed.append("sides")
    if ruled.rescaled and not shape.rescaled:
        changed.append("rescaled")
    if changed:
        field = changed[0]
        raise ValueError(
            f"the rule sets {field}={getattr(ruled, field)!r} for layer {shape.name!r}, which has "
            f"{getattr(shape, field)!r}"
        )
    return ruled


def alike(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two modules compute the same output from the same input."""
    shared = list(map(id, first.parameters())) == list(map(id, second.parameters()))
    return shared and (type(first), first.extra_repr()) == (type(second), second.extra_repr())


def offers(
    model: nn.Module, others: Sequence[Other], coverage: Coverage | None = None
) -> list[str]:
    """Return a message per class of uncovered modules that compute the same as a covered one."""
    coverage = coverage or Coverage()
    uncovered = {id(block.tensor) for block in others if block.parameters and not block.ties}
    names: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        left = uncovered.intersection(map(id, module.parameters(recurse=False)))
        if left and not within(name, coverage.skip) and same_as(module, coverage.covers):
            names.setdefault(class_of(module), []).append(name)
    return [
        f"trained first-order, because {kind.__name__} is a derived class: {', '.join(modules)}; "
        f"{offer(kind, coverage.covers)}"
        for kind, modules in names.items()
    ]


def check_any_covered(
    model: nn.Module, layers: Sequence[Layer], coverage: Coverage | None = None
) -> None:
    """Check that K-FAC covers at least one layer if a module's class extends a covered class.

    Raises:
        ValueError: K-FAC covers no layer, although the model has a trained module, not in
            `coverage.skip`, whose class is derived from a covered class, as a wrapper's can be.
    """
    coverage = coverage or Coverage()
    for name, module in model.named_modules() if not layers else ():
        kind = class_of(module)
        base = covered_base(kind, coverage.covers)
        own = module.parameters(recurse=is_parametrized(module))
        trained = kind not in NEVER_CALLED and any(parameter.requires_grad for parameter in own)
        if base and trained and not maker_of(module, coverage.covers):
            if within(name, coverage.skip):
                continue
            raise ValueError(
                f"K-FAC covers no layer: {name or 'the model'} is a {kind.__name__}, a class "
                f"derived from {base.__name__}, and a derived class can compute something else; "
                f"use {base.__name__} itself, or cover the class with "
                f"coverage=mpikfac.Coverage(covers=...)"
            )


def within(name: str, chosen: Sequence[str]) -> bool:
    """Return whether the module `name` is one of the `chosen` modules, or inside one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in chosen)


def find_uncovered(
    model: nn.Module, covered: Collection[int] = (), ties: Ties | None = None
) -> list[Other]:
    """Return trained parameters whose `id` is not in `covered`, and all running statistics.

    Args:
        ties: the names of each parameter that is not covered because modules share it, by `id`.

    Raises:
        ValueError: a layer has sparse gradients.
    """
    ties = ties or {}
    others = [
        Other(name, parameter, ties.get(id(parameter), ()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered
    ]
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ValueError(f"layer {name!r} has sparse gradients; create it with sparse=False")
        if isinstance(module, (_BatchNorm, _InstanceNorm)):
            buffers = module.named_buffers(name, recurse=False)
            count = module.num_batches_tracked
            others += [Statistic(n, b, count) for n, b in buffers if b.is_floating_point()]
    return others


def covered_shapes(
    model: nn.Module, coverage: Coverage | None = None
) -> tuple[list[LayerShape], list[tuple[str, Shape]]]:
    """Return the layers' shapes, and the names and shapes of other tensors, for `make_plan`."""
    layers, others = cover(model, coverage)
    others.append(Votes(torch.float32, torch.device("cpu")))
    return [layer.shape for layer in layers], [(o.name, tuple(o.tensor.shape)) for o in others]


def trained_shapes(model: nn.Module, coverage: Coverage | None = None) -> list[tuple[str, Shape]]:
    """Return, for every trained parameter, its block's name and its shape, for `Sharding.of`.

    A block is a covered layer or an uncovered parameter.
    """
    layers, others = cover(model, coverage)
    blocks: list[Layer | Other] = [*layers, *others]
    return [(block.name, tuple(p.shape)) for block in blocks for p in block.parameters]
