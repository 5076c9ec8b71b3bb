from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from mpikfac_apps.lab.study import compare
from mpikfac_apps.lab.study.seeds import by_seed

pytestmark = pytest.mark.lab


def run_of(path, accuracies, pace=1.5, scales=()):
    path.mkdir(parents=True)
    rows = []
    for epoch, accuracy in enumerate(accuracies, start=1):
        rows.append(
            {"step": 5 * epoch, "epoch": float(epoch), "seconds": pace * epoch, "loss": 1.0}
        )
        scale = {"kl_scale": scales[epoch - 1]} if scales else {}
        rows += [rows[-1] | scale, rows[-1] | {"test_accuracy": accuracy}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_table_tells_when_the_target_was_reached(tmp_path, capsys):
    fast = run_of(tmp_path / "fast", [0.5, 0.97, 0.99, 0.98])
    slow = run_of(tmp_path / "slow", [0.5, 0.6])
    assert compare.main([fast, slow, "--target", "0.97"]) == 0
    header, first, second, _, *seen = capsys.readouterr().out.splitlines()
    assert header.endswith("epochs to 97.0 %  seconds to 97.0 %")
    assert first.split() == [fast, "4", "6.00", "98.00", "%", "99.00", "%", "2", "3.00"]
    assert second.split() == [slow, "2", "3.00", "60.00", "%", "60.00", "%", "never", "never"]
    assert seen == [
        "A test accuracy of 97.0 % was reached by fast after 2 epochs.",
        "slow did not reach 97.0 %.",
    ]
    assert compare.main([fast, slow, "--target", "97"]) == 0
    assert capsys.readouterr().out.splitlines() == [header, first, second, _, *seen]


@pytest.mark.parametrize("target", ["0.759", "75.9"])
def test_the_target_of_mlperf_is_reached_by_exactly_37950_of_50000_images(tmp_path, capsys, target):
    """Oracle: by hand; a single run, at 75.9 % after 3 epochs of 1.5 s."""
    run = run_of(tmp_path / "run", [0.7, 37_949 / 50_000, 37_950 / 50_000, 0.76])
    assert compare.main([run, "--target", target]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.endswith("epochs to 75.9 %  seconds to 75.9 %")
    assert row.split()[-2:] == ["3", "4.50"]


def test_two_sentences_say_what_was_seen(tmp_path, capsys):
    """Oracle: by hand: 2 epochs of 1.5 s against 3 epochs of 0.5 s."""
    few = run_of(tmp_path / "runs" / "few", [0.5, 0.97])
    quick = run_of(tmp_path / "runs" / "quick", [0.5, 0.6, 0.98], pace=0.5)
    assert compare.main([quick, few, "--target", "97"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "A test accuracy of 97.0 % was reached by few after 2 epochs and by quick after 3 epochs.",
        "In seconds of training, quick was first: quick took 1.50 s and few took 3.00 s.",
    ]


@pytest.mark.parametrize(("scales", "told"), [([0.1, 0.2, 0.9], True), ([0.1, 1.0, 1.0], False)])
def test_a_bound_that_sets_the_length_of_nearly_all_steps_is_told(tmp_path, capsys, scales, told):
    """Oracle: the metrics; the picture then has a third panel."""
    runs = [run_of(tmp_path / "free", [0.5, 0.6, 0.7])]
    runs.append(run_of(tmp_path / "bound", [0.5, 0.6, 0.7], scales=scales))
    assert compare.main([*runs, "--png", str(tmp_path / "curves.svg")]) == 0
    line = "The clip shortened the step in 3 of 3 lines of metrics of bound: with kl_clip, the "
    assert (line in capsys.readouterr().out) == told
    assert "kl_scale" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["a/x", "a/y"], ["x", "y"]),
        (["a/x/run", "a/y/run"], ["x/run", "y/run"]),
        (["a/x"], ["x"]),
        (["a/x", "a"], ["a/x", "a"]),
    ],
)
def test_runs_are_named_by_the_part_that_differs(runs, names):
    """Oracle: by hand."""
    assert list(compare.short_names(runs).values()) == names


def test_the_picture_has_a_title_and_short_names(tmp_path):
    """Oracle: the texts of the picture; a dollar sign in a name."""
    runs = [run_of(tmp_path / name, [0.5, 0.98]) for name in ("$gd_", "kfac")]
    assert compare.main([*runs, "--target", "97", "--png", str(tmp_path / "curves.svg")]) == 0
    found = ElementTree.parse(tmp_path / "curves.svg").iter("{http://www.w3.org/2000/svg}text")
    texts = [text.text for text in found]
    assert {"Test accuracy of $gd_ and kfac; dotted: 97.0 %", "$gd_", "kfac"} <= set(texts)
    assert not any(str(tmp_path) in text for text in texts)


@pytest.mark.parametrize(
    ("option", "kind", "begin"),
    [("png", "png", b"\x89PNG"), ("figure", "pdf", b"%PDF"), ("figure", "svg", b"<?xml")],
)
def test_curves_are_written_in_the_format_of_the_suffix(tmp_path, option, kind, begin):
    """Oracle: the first bytes of the formats."""
    run, file = run_of(tmp_path / "run", [0.5, 0.6]), tmp_path / "new" / f"curves.{kind}"
    assert compare.main([run, f"--{option}", str(file)]) == 0
    assert file.read_bytes().startswith(begin)


# -- seeds ---------------------------------------------------------------------------------------


def seeds_of(path, name, bests, lr=0.1, ranks=2, paces=(1.0, 1.5, 2.0)):
    """Write a run for each seed: the best accuracy, and seconds of an epoch; return the runs."""
    runs = []
    for seed, (best, pace) in enumerate(zip(bests, paces)):
        run = Path(run_of(path / f"{name}-{seed}", [0.5, best], pace))
        options = {"lr": lr, "seed": seed, "run_dir": str(run), "data": {"name": "digits"}}
        (run / "config.yaml").write_text(yaml.safe_dump(options))
        (run / "environment.json").write_text(json.dumps({"ranks": ranks}))
        runs.append(str(run))
    return runs


def test_runs_that_differ_by_the_seed_have_means(tmp_path, capsys):
    """Oracle: by hand: 97, 98 and 99 % are 98 % with half of 4.303 / 3^0.5; two are a range."""
    runs = seeds_of(tmp_path, "kfac", (0.97, 0.98, 0.99)) + seeds_of(tmp_path, "sgd", (0.6, 0.8), 1)
    assert compare.main([*runs, "--target", "0.8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    means = [re.split(r"\s{2,}", line.strip()) for line in lines[7:10]]
    assert means == [
        ["variant", "seeds", "seconds", "final", "best", "epochs to 80.0 %", "seconds to 80.0 %"],
        [
            *("kfac-*", "3", "3.00 \N{PLUS-MINUS SIGN} 2.48"),
            *["98.00 % \N{PLUS-MINUS SIGN} 2.48 %"] * 2,
            *("2 \N{PLUS-MINUS SIGN} 0", "3.00 \N{PLUS-MINUS SIGN} 2.48"),
        ],
        ["sgd-*", "2", "2.00 to 3.00", *["60.00 % to 80.00 %"] * 2, "2 (1 of 2)", "3.00 (1 of 2)"],
    ]
    assert lines[11:] == [
        "A test accuracy of 80.0 % was reached by kfac-* after 2 epochs on average.",
        "1 of 2 seeds of sgd-* did not reach 80.0 %.",
    ]


@pytest.mark.parametrize("changes", [{"lr": 0.2}, {"ranks": 4}])
def test_runs_with_other_options_are_other_variants(tmp_path, changes):
    """Oracle: the number of variants; a seed that is given twice is no further seed."""
    first = seeds_of(tmp_path / "a", "run", (0.9, 0.9))
    second = seeds_of(tmp_path / "b", "run", (0.9, 0.9), **changes)
    again = seeds_of(tmp_path / "c", "run", (0.9, 0.9))
    groups = [sorted(map(str, group)) for group in by_seed(map(Path, first + second + again))]
    assert groups == [first, second, again]


def test_variants_with_the_same_pattern_are_named_in_full(tmp_path):
    """Oracle: the names, by hand."""
    runs = seeds_of(tmp_path, "a", (0.9, 0.9))
    for number, run in enumerate(seeds_of(tmp_path, "other", (0.9, 0.9), lr=0.2)):
        Path(run).rename(tmp_path / f"a-{number + 2}")
    runs += [str(tmp_path / f"a-{number}") for number in (2, 3)]
    variants = compare.variants_of({run: compare.curve_of(Path(run)) for run in runs})
    assert list(variants) == ["a-0, a-1", "a-2, a-3"]


def test_two_variants_with_seeds_are_drawn_as_two_curves(tmp_path):
    """Oracle: the names in the picture."""
    runs = seeds_of(tmp_path, "kfac", (0.97, 0.98, 0.99)) + seeds_of(tmp_path, "sgd", (0.6, 0.8), 1)
    assert compare.main([*runs, "--figure", str(tmp_path / "curves.svg")]) == 0
    found = ElementTree.parse(tmp_path / "curves.svg").iter("{http://www.w3.org/2000/svg}text")
    texts = {text.text for text in found}
    assert {"kfac-*", "sgd-*", "Test accuracy of kfac-* and sgd-*"} <= texts
    assert "kfac-0" not in texts


def test_tables_are_written_as_csv_and_latex(tmp_path):
    """Oracle: the numbers of the runs; the rows in LaTeX, by hand."""
    runs = seeds_of(tmp_path, "k_fac", (0.97, 0.98, 0.99))
    csv_file, tex = tmp_path / "new" / "table.csv", tmp_path / "table.tex"
    for file in (csv_file, tex):
        assert compare.main([*runs, "--target", "0.98", "--table", str(file)]) == 0
    with open(csv_file, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == runs
    assert {row["variant"] for row in rows} == {"k_fac-*"}
    assert [float(row["best"]) for row in rows] == [0.97, 0.98, 0.99]
    assert [row["steps_to_target"] for row in rows] == ["", "10", "10"]
    assert rows[1]["seconds_to_target"] == "3.0" and rows[0]["target"] == "0.98"
    lines = tex.read_text().splitlines()
    (row,) = (line for line in lines if line.lstrip().startswith("k"))
    assert row.split("&")[0].strip() == r"k\_fac-*"
    assert r"98.00 \% $\pm$ 2.48 \%" in row and "2 (2 of 3)" in row
    assert compare.main([runs[0], "--table", str(tex)]) == 0
    (row,) = (line for line in tex.read_text().splitlines() if "k" in line and "&" in line)
    assert [cell.strip() for cell in row.split("&")][:3] == [r"k\_fac-0", "2", "2.00"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "metrics.jsonl is missing; pass the run_dir of a run"),
        ("", "metrics.jsonl has no complete epoch yet"),
        ('{"step": 1, "epoch": 1, "seconds": 1}\n{"st\n', "metrics.jsonl, line 2 is not JSON"),
    ],
)
def test_a_run_that_cannot_be_read_ends_with_code_2_and_one_line(
    tmp_path, capsys, content, message
):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert compare.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpikfac compare: ")
    assert message in line


def test_a_run_that_writes_a_line_at_this_moment_is_read_up_to_it(tmp_path, capsys):
    run = run_of(tmp_path / "run", [0.5, 0.6])
    with open(f"{run}/metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 4')
    assert compare.main([run]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[1:] == [
        "2",
        "3.00",
        "60.00",
        "%",
        "60.00",
        "%",
    ]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("target", "-1", "target=-1.0 must be a finite number > 0 or null"),
        ("figure", "curves.gif", "figure: curves.gif must end in .pdf, .png or .svg"),
        ("table", "table.xls", "table: table.xls must end in .csv or .tex"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys, option, value, told):
    assert compare.main(["run", f"--{option}", value]) == 2
    assert capsys.readouterr().err == f"mpikfac compare: {told}\n"
