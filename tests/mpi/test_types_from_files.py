"""Every rank executes the files of types that the options of a program name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mpikfac import UserError
from mpikfac_apps.guard.ranks import read_options
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import TRAIN

pytestmark = pytest.mark.lab

RULE = """
from dataclasses import dataclass

from mpikfac.plan import Aggregation

@dataclass(frozen=True)
class Power:
    exponent: int = 1

@dataclass(frozen=True, kw_only=True, repr=False)
class Scaled(Aggregation):
    name = "scaled"
    factor: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "power", Power(2))

    def combine(self, vectors):
        return self.factor**self.power.exponent * vectors.mean(0)
"""


def test_a_type_from_a_file_is_the_same_on_all_ranks(comm, tmp_path):
    """Oracles: the options as given, and the rule by hand; no folder of the file is importable."""
    folder = Path(comm.bcast(str(tmp_path))) / "rules"
    name = f"{folder / 'scaled_rule.py'}:Scaled"
    if comm.rank == 0:
        folder.mkdir()
        (folder / "scaled_rule.py").write_text(RULE)
    given = [f"--sync.aggregation={name}", "--sync.aggregation.factor=3"]
    options = read_options(comm, lambda: TRAIN.read(given))
    values = flat(options)
    assert values["sync.aggregation.type"] == name
    assert comm.allgather(values) == [values] * comm.size
    rule = options.distribution.sync.aggregation
    assert torch.equal(rule.combine(torch.tensor([[1.0], [3.0]])), torch.tensor([18.0]))


def test_a_file_that_a_rank_lacks_is_named_on_all_ranks(comm, tmp_path, monkeypatch):
    """Oracle: the message; relative paths start from the folder of the rank."""
    place = tmp_path / str(comm.rank)
    place.mkdir()
    monkeypatch.chdir(place)
    if comm.rank == 0:
        Path("own_rule.py").write_text(RULE)
    words = r"^options: on rank 1, own_rule\.py is not a file; every rank needs the file"
    with pytest.raises(UserError, match=words) if comm.size > 1 else nullcontext():
        read_options(comm, lambda: TRAIN.read(["--sync.aggregation=own_rule.py:Scaled"]))
