"""NorMuon: Muon with rows of about equal lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpikfac.plan import Form
from mpikfac.solvers.gradient.muon import Muon, form_of


@dataclass(frozen=True)
class NorMuon(Muon):
    """The gradient, or its momentum, as it is: `Length("rows")` makes polar factor and rows.

    Beside what Muon keeps, a number is kept for each row of a matrix [Li et al. 2025].
    """

    form: ClassVar[Form] = form_of("normuon", "rows")
    usual: ClassVar[Mapping[str, Any]] = {"length": {"source": "rows", "momentum": 0.95}}
