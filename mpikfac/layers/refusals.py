"""Refuse modules that cannot be covered: all modules of a model at once, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from mpikfac.layers.layer import Layer

ALIKE = "the layers share a parameter but are not alike, which is not covered"


@dataclass(frozen=True)
class Refusal:
    """A reason to refuse modules.

    Attributes:
        names: the modules with the reason.
        reason: a text such as "Embedding with max_norm=1.0 is not covered".
        skip: the modules to skip, of `names`.
    """

    names: tuple[str, ...]
    reason: str
    skip: tuple[str, ...]

    def __str__(self) -> str:
        *first, last = map(repr, self.names)
        names = f"layers {', '.join(first)} and {last}" if first else f"layer {last}"
        return f"{names}: {self.reason}"


class Refused(ValueError):
    """Report all modules of a model that K-FAC refuses to cover.

    Attributes:
        reasons: by refused module, the names of all modules with the same reason, and the reason.
    """

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.reasons = {name: str(refusal) for refusal in refusals for name in refusal.skip}
        text = "; ".join(map(str, refusals))
        names = ", ".join(map(repr, self.reasons))
        super().__init__(f"{text}; add {names} to skip for first-order training")


def by_reason(refused: Iterable[tuple[str, str]]) -> list[Refusal]:
    """Return refusals from pairs of a module's name and a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    return [Refusal(tuple(modules), reason, tuple(modules)) for reason, modules in names.items()]


def not_alike(model: nn.Module, layers: Sequence[Layer]) -> list[Refusal]:
    """Return modules that share a parameter, where a layer misses a use of the parameter.

    A gradient sums over all uses of the parameter.
    """
    name_of = {id(module): name for name, module in model.named_modules()}
    holders: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), {})[name] = module
    skip: dict[tuple[str, ...], dict[str, None]] = {}
    for layer in layers:
        modules = {part for module in layer.modules for part in module.modules()}
        for parameter in layer.parameters:
            held = holders[id(parameter)]
            if not modules.issuperset(held.values()):
                names = dict.fromkeys(name_of[id(module)] for module in layer.modules)
                skip.setdefault(tuple(held), {}).update(names)
    return [Refusal(names, ALIKE, tuple(skipped)) for names, skipped in skip.items()]


def check_names(model: nn.Module, choice: str, chosen: Sequence[str]) -> None:
    """Check the names of modules in a choice such as "skip".

    Raises:
        ValueError: no module has the name.
    """
    names = [name for name, _ in model.named_modules()]
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{choice} names {name!r}, which is no module of the model{hint}")
