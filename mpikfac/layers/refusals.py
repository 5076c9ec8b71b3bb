"""Report, in a single error, all modules of a model that cannot be covered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from mpikfac.layers.layer import skipping


@dataclass(frozen=True)
class Refusal:
    """A reason why modules cannot be covered.

    Attributes:
        names: the names of the modules that cannot be covered for this reason.
        reason: the reason as text, such as "Embedding with max_norm=1.0 is not covered".
    """

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        *first, last = map(repr, self.names)
        names = f"layers {', '.join(first)} and {last}" if first else f"layer {last}"
        return f"{names}: {self.reason}"


class Refused(ValueError):
    """Report all modules of a model that K-FAC cannot cover.

    Attributes:
        reasons: for each module's name, a text with the reason and all modules to which it applies.
        skip: the names of the modules that were skipped, and of those that cannot be covered.
        without_remedy: the error message without the remedy, a way to train these modules
            first-order.
    """

    def __init__(self, refusals: Sequence[Refusal], skipped: Sequence[str]) -> None:
        self.reasons = {name: str(refusal) for refusal in refusals for name in refusal.names}
        self.skip = [*skipped, *self.reasons]
        self.without_remedy = "; ".join(map(str, refusals))
        remedy = f"for first-order training, pass {skipping(self.skip)}"
        super().__init__(f"{self.without_remedy}; {remedy}")


def by_reason(refused: Iterable[tuple[str, str]]) -> list[Refusal]:
    """Group pairs `(name of a module, reason)` by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    return [Refusal(tuple(modules), reason) for reason, modules in names.items()]


def check_names(model: nn.Module, choice: str, chosen: Sequence[str]) -> None:
    """Check that the names in a choice such as "skip" are those of modules of the model.

    Raises:
        ValueError: a name is not that of a module.
    """
    names = [name for name, _ in model.named_modules()]
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{choice} names {name!r}, which is not a module of the model{hint}")
