from __future__ import annotations

import json

import pytest

from mpikfac_apps.study import compare


def run_of(path, accuracies):
    path.mkdir()
    rows = []
    for epoch, accuracy in enumerate(accuracies, start=1):
        rows.append({"step": 5 * epoch, "epoch": float(epoch), "seconds": 1.5 * epoch, "loss": 1.0})
        rows.append(rows[-1] | {"test_accuracy": accuracy})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_table_tells_when_the_target_was_reached(tmp_path, capsys):
    fast = run_of(tmp_path / "fast", [0.5, 0.97, 0.99, 0.98])
    slow = run_of(tmp_path / "slow", [0.5, 0.6])
    assert compare.main([fast, slow, "--target", "0.97"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[-4:] == ["to", "0.97", "seconds", "to", "0.97"][-4:]
    assert first.split() == [fast, "4", "6.0", "98.00%", "99.00%", "2", "3.0"]
    assert second.split() == [slow, "2", "3.0", "60.00%", "60.00%", "never", "never"]


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
    assert capsys.readouterr().out.splitlines()[-1].split()[1:] == ["2", "3.0", "60.00%", "60.00%"]


def test_a_wrong_argument_is_one_line(capsys):
    assert compare.main(["run", "--target", "97"]) == 2
    text = "mpikfac compare: target=97.0 must be a finite number > 0 and <= 1 or null\n"
    assert capsys.readouterr().err == text
