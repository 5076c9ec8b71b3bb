"""NorMuon: Muon with rows of approximately equal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpikfac.plan import AdamGrafting, Form
from mpikfac.preconditioners.gradient.muon import Muon, form_of
from mpikfac.preconditioners.preconditioner import Defaults


@dataclass(frozen=True, kw_only=True, repr=False)
class NorMuon(Muon):
    """The gradient, or its momentum, unchanged [NorMuon].

    `AdamGrafting(normalize_rows=True)` computes the polar factor and normalises its rows, for which
    it keeps one value per row, in addition to what it keeps for Muon.
    """

    name: ClassVar[str] = "normuon"
    form: ClassVar[Form] = form_of(name, "grafting.normalize_rows")
    defaults: ClassVar[Defaults] = Defaults(
        grafting=AdamGrafting(normalize_rows=True, momentum=0.95)
    )
