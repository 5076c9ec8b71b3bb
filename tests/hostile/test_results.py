"""Results of runs that no run wrote: compare, study and inspect end with one line, or leave out."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from mpikfac_apps.lab.study import compare, jobs, progress, results, spec
from mpikfac_apps.lab.study.report import timelines

pytestmark = pytest.mark.lab

GOOD = {"step": 1, "epoch": 1.0, "seconds": 1.0, "test_accuracy": 0.5}
LINES = {
    "list": "[1]",
    "deep": "[" * 10**5,
    "escape": '"\x1b[2J',
    "lacks a key": '{"step": 1}',
    "text for a number": json.dumps(GOOD | {"seconds": "1"}),
    "truth for a number": json.dumps(GOOD | {"step": True}),
    "step 0": json.dumps(GOOD | {"step": 0}),
    "no speed": json.dumps(GOOD | {"images_per_second": 0}),
    "huge number": json.dumps(GOOD | {"test_accuracy": 10**400}),
    "endless time": json.dumps(GOOD | {"seconds": 1e999}),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_none_of_metrics(tmp_path, capsys, line) -> None:
    """Oracle: one printable line with the number of the line."""
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(GOOD)}\n{LINES[line]}\n")
    assert compare.main([str(tmp_path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/metrics.jsonl, line 2 is no" in told and told.isprintable()


def test_a_diverged_run_is_compared(tmp_path, capsys) -> None:
    """Oracle: NaN in the table, as the run wrote NaN."""
    row = GOOD | {"test_loss": float("nan"), "test_accuracy": float("nan")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert compare.main([str(tmp_path)]) == 0
    assert "nan %" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "huge"])
def test_metrics_that_are_no_file(tmp_path, capsys, kind) -> None:
    """Oracle: one line with the path and the kind."""
    path = tmp_path / "metrics.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("")
        os.truncate(path, 2**40)
    assert compare.main([str(tmp_path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert str(path) in told and ("at most" if kind == "huge" else f"it is a {kind}") in told


WRONG = ({"epoch": "1"}, {"step": None}, {"epoch": 10**400})


@pytest.mark.parametrize("line", [*(json.dumps(GOOD | one) for one in WRONG), "[" * 3000])
def test_a_line_that_tells_no_progress(tmp_path, line) -> None:
    """Oracle: no part of the run, as without a line; half of the run, from a good line."""
    study = tmp_path / "study.yaml"
    study.write_text("options: {epochs: 2}\nmatrix: {strategy: [sgd], ranks: [1]}\n")
    (cell,) = spec.read(study).cells
    for text, part in ((line, 0.0), (json.dumps(GOOD), 0.5)):
        (tmp_path / "metrics.jsonl").write_text(f"{text}\n")
        assert progress.done_part(tmp_path, cell) == part


RESULT = {"code": 0, "why": "", "seconds": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 10**5,
        *(json.dumps(RESULT | one) for one in ({"code": "0"}, {"why": 1})),
    ],
)
def test_a_result_that_is_none(tmp_path, text) -> None:
    """Oracle: one line with the path and the remedy; unknown keys are left out."""
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} is damaged; delete the file"):
        jobs.result(tmp_path)
    path.write_text(json.dumps(RESULT | {"more": 1}))
    assert jobs.result(tmp_path) == jobs.Result(**RESULT)


@pytest.mark.parametrize(
    "content",
    [
        {"steps": 3, "seconds": 1.0, "ranks": []},
        {"steps": [1], "seconds": "1", "ranks": []},
        {"steps": [1], "seconds": 1.0, "ranks": [{"stages": [], "beside": {}}]},
        {"steps": [1], "seconds": 1.0, "ranks": [{"stages": {"a": {"seconds": 1}}, "beside": {}}]},
        [],
    ],
)
def test_means_of_another_form(tmp_path, content) -> None:
    """Oracle: one line with the path; a file that was not written whole counts as missing."""
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{path} is damaged; delete the file"):
        results._json(path, results.MEANS)
    path.write_text(json.dumps(content)[:-1])
    assert results._json(path, results.MEANS) == {}


SLICE = {"ph": "X", "name": "step 1", "pid": 0, "ts": 0.0, "dur": 1.0}
TRACES = {
    "unpacks to a GiB": gzip.compress(b" " * 2**27, 9) * 8,
    "no gzip": b"trace",
    "cut off": gzip.compress(b"{}" * 1000)[:-9],
    "no trace": gzip.compress(b"[]"),
    "no slices": gzip.compress(b'{"traceEvents": [{"ph": "X"}]}'),
    "text for a time": gzip.compress(json.dumps({"traceEvents": [SLICE | {"ts": "0"}]}).encode()),
    "many steps": gzip.compress(
        json.dumps({"traceEvents": [SLICE | {"name": f"step {i}"} for i in range(4000)]}).encode()
    ),
}


@pytest.mark.parametrize("trace", TRACES)
def test_a_timeline_that_cannot_be_drawn_is_left_out(tmp_path, trace) -> None:
    """Oracle: nothing to draw; one slice of a good timeline."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(TRACES[trace])
    assert timelines._trace(tmp_path) == []
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [SLICE]}).encode()))
    assert timelines._trace(tmp_path) == [SLICE]
