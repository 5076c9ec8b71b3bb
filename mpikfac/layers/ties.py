"""Leave parameters to first-order training that modules share without being a single layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from mpikfac.layers.layer import Layer

Ties = Mapping[int, Sequence[str]]
"""The names of shared parameters in all modules that have the parameter, by `id`."""


def without_ties(model: nn.Module, layers: Sequence[Layer]) -> tuple[list[Layer], Ties]:
    """Return the layers that see all uses of their parameters, and the other layers' ties.

    A gradient sums over all uses of a parameter, such as the weight of an embedding that is the
    weight of the head, too; factors of some of the uses are not the curvature of the sum.
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
