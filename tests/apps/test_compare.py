from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from mpikfac_apps.study import compare


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
    line = "The bound shortened the step in 3 of 3 lines of metrics of bound: with kl_clip, the "
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


def test_curves_are_written_as_png(tmp_path):
    run, png = run_of(tmp_path / "run", [0.5, 0.6]), tmp_path / "new" / "curves.png"
    assert compare.main([run, "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "metrics.jsonl is missing; give the run_dir of a run"),
        ("", "metrics.jsonl holds no complete epoch yet"),
        ('{"step": 1, "epoch": 1, "seconds": 1}\n{"st\n', "metrics.jsonl, line 2 is no JSON"),
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


def test_a_wrong_argument_is_one_line(capsys):
    assert compare.main(["run", "--target", "-1"]) == 2
    text = "mpikfac compare: target=-1.0 must be a finite number > 0 or null\n"
    assert capsys.readouterr().err == text
