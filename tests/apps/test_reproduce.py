"""Published results: each entry agrees with its source, and a wrong figure fails."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from mpikfac_apps.lab.reproduce import appendix, published, records, rules, summary, training
from mpikfac_apps.lab.reproduce.entry import VERDICTS, Entry, Row
from mpikfac_apps.lab.reproduce.registry import ENTRIES
from mpikfac_apps.lab.reproduce.reproduce import main
from mpikfac_apps.lab.reproduce.summary import Reproduced
from mpikfac_apps.problems import models
from support.launch import environment

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
TRAINS = ("defaults", "exchange-rules")
MADE_UP = Entry(
    name="made-up",
    about="a number & its <source>",
    paper="SC20",
    source="table 1",
    found="predicted",
    how="by hand",
    tolerance=0.1,
    why="made up",
    seconds=1,
    rows=list,
)


@pytest.fixture
def made_up(monkeypatch):
    """Return a function that replaces all entries by one with a given row."""

    def replaced(row: Row) -> None:
        entries = {"made-up": replace(MADE_UP, rows=lambda: [row])}
        monkeypatch.setattr("mpikfac_apps.lab.reproduce.reproduce.ENTRIES", entries)

    return replaced


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.gate) if name in TRAINS else name for name in ENTRIES],
)
def test_numbers_are_within_the_tolerance(name, monkeypatch, capsys):
    """Oracle: the published number of each row; known misses are still misses."""
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    code = main([name])
    text, error = capsys.readouterr()
    assert code == 0, text + error
    assert f"mpikfac reproduce {name}" in text and ENTRIES[name].source.split()[0] in text
    assert "1 experiment, 0 not run" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("row", "code", "told"),
    [
        (Row("ms", "4 ranks", 100.0, 109.0), 0, "agrees"),
        (Row("ms", "4 ranks", 90.0, 109.0), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 100.0, 89.0), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 100.0, float("nan")), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 100.0, 50.0, "a reason"), 0, "miss: a reason"),
        (Row("ms", "4 ranks", 100.0, 99.0, "a reason"), 1, "but listed as a miss"),
        (Row("ms", "4 ranks", 100.0, 109.0, fitted=True), 0, "fitted"),
        (Row("ms", "4 ranks", 100.0, 120.0, fitted=True), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 90.0, 109.0, most=100.0), 0, "agrees"),
        (Row("ms", "4 ranks", 90.0, 111.0, most=100.0), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 90.0, 80.0, most=100.0), 1, "-11 %"),
        (Row("ms", "4 ranks", 90.0, 95.0, "a reason", most=100.0), 1, "+0 %"),
    ],
)
def test_a_wrong_figure_is_an_error(row, code, told, made_up, capsys):
    """Oracle: by hand, with a tolerance of 10 %."""
    made_up(row)
    assert main(["made-up"]) == code
    assert told in capsys.readouterr().out


def test_a_planted_figure_of_a_paper_is_found(monkeypatch, capsys):
    """Oracle: an epoch of K-FAC of 35 minutes in the place of 30, which is too far from 25.

    What it adds, 20 minutes, is then as predicted, and no longer the miss that is listed.
    """
    monkeypatch.setitem(published.KFAC_EPOCHS, (16, 90), 35 * 60)
    assert main(["sc20-steps"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    for verdict, what in (
        ("outside the tolerance", "ms of a step, K-FAC (10)"),
        ("listed as a miss", "ms of a step, what K-FAC (10) adds"),
    ):
        (line,) = [line for line in lines if line.endswith(verdict)]
        assert what in line and "16 GPUs, 90 epochs" in line
    assert "2 outside; exit code 1" in last


def test_accuracies_are_compared_in_points(monkeypatch, capsys):
    """Oracle: accuracies by hand; one point less than SGD is too little."""
    sgd = {f"{records.SGD}0": [0.5, 0.84]}
    monkeypatch.setattr(records, "record", lambda _: sgd)
    for accuracy, code, off in ((0.8378, 0, "+0.00 points"), (0.83, 1, "-0.78 points")):
        found = [{"test_accuracy": accuracy}]
        monkeypatch.setattr(records, "defaults", lambda _, found=found: found)
        assert main(["time-to-accuracy"]) == code
        text = capsys.readouterr().out
        assert off in text and ("record agrees" in text) == (code == 0)


def test_the_sizes_of_formulas_are_those_of_the_network():
    """Oracle: the parameters and running statistics of torch's modules."""
    network = models.build("resnet50", classes=1000)
    tensors = [*network.parameters(), *network.buffers()]
    weights = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    sizes = dict.fromkeys(("covered", "factors", "cubes", "largest"), 0)
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            outputs = len(module.weight)
            inputs = module.weight[0].numel() + (module.bias is not None)
            sizes["covered"] += outputs * inputs
            sizes["factors"] += outputs**2 + inputs**2
            sizes["cubes"] += outputs**3 + inputs**3
            sizes["largest"] = max(sizes["largest"], inputs**3)
    mib = 4 / 2**20
    assert round(mib * sizes["factors"], 1) == published.FACTORS
    assert round(mib * sizes["covered"], 1) == published.WEIGHTS
    assert round(mib * weights, 1) == published.GRADIENTS
    assert round(sizes["largest"] / sizes["cubes"], 3) == published.LARGEST


@pytest.mark.parametrize(
    ("tolerance", "points", "number", "off"),
    [
        (0.2, False, "1,063", "+1 %"),
        (0.02, False, "1,063", "+1.0 %"),
        (0.002, False, "1,063.2", "+0.98 %"),
        (1e-9, False, "1,063.2123457", "+0.97942309 %"),
        (0.5, True, "1,063.21", "+10.31 points"),
    ],
)
def test_numbers_have_as_many_digits_as_the_tolerance(tolerance, points, number, off):
    """Oracle: 1063.2123456789 and its deviation from 1052.9 by hand."""
    entry = replace(MADE_UP, tolerance=tolerance, points=points)
    cells = appendix.cells(entry, Row("ms", "here", 1052.9, 1063.2123456789))
    assert cells[3:5] == (number, off)


def test_the_summary_counts_all_rows():
    """Oracle: rows by hand with all verdicts, and a result that was not run."""
    kinds = {
        "agrees": Row("ms", "here", 100.0, 101.0),
        "fitted": Row("ms", "here", 100.0, 101.0, fitted=True),
        "miss": Row("ms", "here", 100.0, 150.0, "a reason"),
        "outside the tolerance": Row("ms", "here", 100.0, 150.0),
        "within the tolerance, but listed as a miss": Row("ms", "here", 100.0, 101.0, "a reason"),
    }
    assert [MADE_UP.verdict(row) for row in kinds.values()] == list(kinds)
    recorded = replace(MADE_UP, name="old", found="recorded")
    rows = list(kinds.values())
    results = [
        Reproduced(MADE_UP, rows, 2.0),
        Reproduced(recorded, rows[:1] * 3, 3.0),
        Reproduced(MADE_UP, [], 4.0, "no ranks"),
    ]
    assert list(summary.table(results)) == [
        ("made-up", MADE_UP.about, "predicted", "5", "1", "1", "1", "2", "0", "2"),
        ("old", MADE_UP.about, "recorded", "3", "3", "0", "0", "0", "0", "3"),
        ("made-up", MADE_UP.about, "predicted", "0", "0", "0", "0", "0", "1", "4"),
        ("all", "", "", "8", "4", "1", "1", "2", "1", "9"),
    ]
    assert summary.line(results) == (
        "3 experiments, 1 not run; 8 rows: 4 agree, 1 fitted, 1 miss, 2 outside; exit code 1; 9 s"
    )
    for part, code in ((results[1:2], 0), (results[2:], 1), (results[:1], 1)):
        assert summary.exit_code(part) == code


def test_exchanged_ranks_and_signs_are_found():
    """Oracle: weights whose norm is the same."""
    weights = np.random.default_rng(1).normal(size=(4, rules.SIZE))
    own = rules.projection(weights)
    for wrong in (weights[::-1], -weights, weights[:, ::-1]):
        assert abs(rules.projection(wrong) / own - 1) > 1e-3


def test_all_results_are_listed(capsys):
    """Oracle: the registry; the page lists the same names."""
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(ENTRIES)]] == list(ENTRIES)
    page = (ROOT / "docs" / "extensions" / "reproduce.md").read_text()
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == list(ENTRIES)
    for verdict in VERDICTS:
        assert f"\n| {verdict} |" in page


def test_an_unknown_result_is_refused(capsys):
    """Oracle: one line with the name that was meant."""
    assert main(["sc20-step"]) == 2
    assert capsys.readouterr().err == (
        "mpikfac reproduce: 'sc20-step' is unknown; did you mean sc20-steps?\n"
    )


def test_a_program_that_hangs_is_ended():
    """Oracle: one line, although its child keeps the output open."""
    sleep = ["sleep", "20"]
    child = f"import subprocess; subprocess.run({sleep})"
    with pytest.raises(ValueError, match=r"^-c .* did not end within 0\.5 s$"):
        training.run(["-c", child], limit=0.5)


def test_one_refusal_leaves_the_other_results(monkeypatch, tmp_path, capsys):
    """Oracle: the sections of a result that is refused and of one that is found, and the files."""

    def refused():
        raise ValueError("no ranks")

    sound = replace(MADE_UP, name="sound", rows=lambda: [Row("ms", "here", 100.0, 101.0)])
    entries = {"made-up": replace(MADE_UP, rows=refused), "sound": sound}
    monkeypatch.setattr("mpikfac_apps.lab.reproduce.reproduce.ENTRIES", entries)
    assert main(["--appendix", str(tmp_path)]) == 1
    assert "could not be run: no ranks" in capsys.readouterr().out
    for kind in ("md", "html"):
        text = (tmp_path / f"artifact.{kind}").read_text()
        assert "Could not be run: no ranks" in text and "101" in text
    assert main(["made-up"]) == 2
    assert capsys.readouterr().err == "mpikfac reproduce: no ranks\n"


def test_columns_say_where_expected_numbers_are_from():
    """Oracle: entries whose source is this repository or a formula."""
    own = {name for name, entry in ENTRIES.items() if entry.expected != "published"}
    assert own == {
        *("sc20-bytes", "kaisa-bytes", "sc20-ratios"),
        *("smpi-collectives", "exchange-rules", "defaults"),
    }
    for name in own - {"sc20-ratios"}:
        entry = ENTRIES[name]
        assert entry.paper.startswith("method") and entry.expected in appendix.head(entry)


def test_records_need_the_repository(monkeypatch, tmp_path, capsys):
    """Oracle: one line with the missing file and the remedy."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert main(["time-to-accuracy"]) == 2
    error = capsys.readouterr().err
    assert "time_to_accuracy.json is missing" in error and error.count("\n") == 1


class Text(HTMLParser):
    """Collect the texts of a page, and the elements that are open at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_appendix_has_commands_numbers_and_versions(made_up, tmp_path, capsys):
    """Oracle: the rows, in both formats; names and values of HTML are escaped."""
    made_up(Row("ms of a step", "4 ranks", 100.0, 50.0, "a reason"))
    assert main(["--appendix", str(tmp_path / "new")]) == 0
    markdown, html = (tmp_path / "new" / f"artifact.{kind}" for kind in ("md", "html"))
    assert str(html) in capsys.readouterr().out
    page = Text()
    page.feed(html.read_text())
    assert page.open == []
    for text in (markdown.read_text(), "".join(page.words)):
        assert "A number & its <source>." in text
        assert "command: mpikfac reproduce made-up" in text
        assert "1 experiment, 0 not run; 1 row: 0 agree, 0 fitted, 1 miss, 0 outside; exit" in text
        assert "predicted by hand" in text and "10 %: made up" in text
        assert "pip install -c constraints.txt" in text and "OMPI_ALLOW_RUN_AS_ROOT=1" in text
        for verdict, meaning in VERDICTS.items():
            assert verdict in text and meaning in text
        for fact in ("processor", "memory", "torch", "commit", "table 1"):
            assert fact in text
    row = "| ms of a step | 4 ranks | 100 | 50 | -50 % | miss: a reason |"
    assert row in markdown.read_text().splitlines()
