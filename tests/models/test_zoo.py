"""Networks of timm and transformers: every covered layer is right, alone and on two ranks.

PYTHONPATH=tests python tests/models/test_zoo.py   # writes docs/reference/models.md anew
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torch import nn

import mpikfac
from mpikfac_apps.checking import comparison
from mpikfac_apps.checking.comparison import Finding, alike, findings_of
from mpikfac_apps.checking.model import Subject
from support import zoo
from support.launch import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(zoo.missing()), reason=f"{' and '.join(zoo.missing())} not installed"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
PROGRAM = str(ROOT / "tests" / "programs" / "zoo.py")
EXAMPLES = 4
LARGEST_PRODUCT = 700
"""Order of a Kronecker product that is written out: dense solves take most of the time."""


@cache
def checked(name: str) -> tuple[Subject, dict[str, Finding]]:
    """Return a network, and the results of `mpikfac check` for the covered layers."""
    asked = zoo.asked(name)
    largest, comparison.LARGEST_PRODUCT = comparison.LARGEST_PRODUCT, LARGEST_PRODUCT
    try:
        return asked, findings_of(asked, mpikfac.world(), EXAMPLES)
    finally:
        comparison.LARGEST_PRODUCT = largest


@cache
def job() -> CompletedProcess[str]:
    """Return the end of a job that trains all networks on two ranks."""
    return launch(2, PROGRAM, *zoo.ZOO, timeout=540)


def on_two_ranks(name: str) -> Mapping[str, float]:
    """Return the differences of a network's weights after training, by strategy."""
    assert job().returncode == 0, job().stderr
    return json.loads(job().stdout.splitlines()[-1])[name]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_numbers_of_covered_layers(name):
    """Oracle: autograd and dense solves, as `mpikfac check` compares."""
    _, findings = checked(name)
    assert {layer: one.wrong for layer, one in findings.items() if one.wrong} == {}
    assert sum(bool(one.errors) for one in findings.values()) >= 1


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_on_two_ranks(name):
    """Oracle: one process on the joined batches; four steps."""
    off = on_two_ranks(name)
    assert {strategy for strategy, one in off.items() if not alike(one)} == set()


# -- the page ------------------------------------------------------------------------------------

HEADING = """# Third-party models

This table shows which layers K-FAC covers in networks from timm and transformers. The networks are
small and have random weights. Each one is tested with `mpikfac check` and four steps on two ranks.
`PYTHONPATH=tests python tests/models/test_zoo.py` writes this page. Install the packages with
`pip install ".[models]"` and `pip install --no-deps timm`.

- **covered**: the covered fraction of all trained parameters, and the classes of covered modules.
- **not covered**: the classes whose parameters are trained only by the optimizer.
- **to skip**: the modules that K-FAC rejects unless they are listed in `skip`. "positions" marks
  embeddings whose input has one row for all examples or one per position; unless they are skipped,
  their curvature is wrong, and a warning is logged. Modules in brackets have no statistics, because
  their weight is used without calling the module.
- **right**: in float64, factors, gradients and directions match the results of autograd and dense
  solves to 1e-9, and the weights after four steps on two ranks match those of a single process to
  1e-6.

"""
COLUMNS = "network", "covered", "not covered", "to skip", "right"


def page() -> str:
    """Return the page."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, zoo.ZOO)]
    return HEADING + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(name: str) -> tuple[str, ...]:
    """Return the cells of a network."""
    asked, findings = checked(name)
    layers, others = mpikfac.layers.cover(asked.model, asked.coverage)
    seen = [layer for layer in layers if findings[layer.name].vectors]
    unseen = [layer.name for layer in layers if not findings[layer.name].vectors]
    rest = {id(o.tensor) for o in others if o.parameters}
    total = sum(p.numel() for p in asked.model.parameters() if p.requires_grad)
    share = sum(p.numel() for layer in seen for p in layer.parameters) / total
    covered = sorted({type(module).__name__ for layer in seen for module in layer.modules})
    left = sorted({shown(module, asked) for module in uncovered(asked, rest)})
    positions = zoo.ZOO[name].positions
    named = [code(asked.refused), f"positions: {code(positions)}" if positions else ""]
    skip = ["; ".join(filter(None, named)), f"({code(unseen)})" if unseen else ""]
    right = not any(one.wrong for one in findings.values())
    alike_on_two = all(map(alike, on_two_ranks(name).values()))
    verdict = "yes" if right and alike_on_two else "no"
    return name, f"{share:.0%}: {code(covered)}", code(left), " ".join(skip).strip(), verdict


def uncovered(asked: Subject, rest: set[int]) -> Iterator[nn.Module]:
    """Yield modules with own parameters in `rest`, without modules in `skip`."""
    for name, module in asked.model.named_modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if own & rest and name not in asked.coverage.skip:
            yield module


def shown(module: nn.Module, asked: Subject) -> str:
    """Return the name of a module's class, with a star if the class can be covered by a line."""
    same = mpikfac.layers.same_as(module, asked.coverage.covers)
    return type(module).__name__ + "*" * same


def code(names: Iterable[str]) -> str:
    """Return names as code."""
    return ", ".join(f"`{name.removeprefix('network.')}`" for name in names)


def test_the_page_shows_what_is_covered():
    """Oracle: the networks."""
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
