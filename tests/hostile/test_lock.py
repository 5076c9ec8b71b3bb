"""Locks that no run wrote: refused in one line, at once, without a way out of the directory."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest

from mpikfac_apps.guard.lock import Holder, Lock

RUN = Holder("a" * 32, "node5", 1, "elsewhere", "1", "", "", "2026-01-01")


def written(**changes: object) -> str:
    return json.dumps(dataclasses.asdict(RUN) | changes)


TEXTS = {
    "empty": "",
    "deep": "[" * 10**5,
    "list": "[]",
    "number": "1",
    "lacks a key": '{"token": "a"}',
    "unknown key": written(more=1),
    "path in the token": written(token="../../outside"),
    "long token": written(token="a" * 300),
    "empty token": written(token=""),
    "pid as text": written(pid="../../etc/passwd"),
    "pid as truth": written(pid=True),
    "host as list": written(host=["node5"]),
    "no job": written(job=None),
    "long number": '{"pid": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_lock_that_names_no_run(tmp_path, text) -> None:
    """Oracle: the message; the file stays for the user to look at."""
    (tmp_path / "lock").write_text(TEXTS[text])
    with pytest.raises(
        ValueError, match=f"{tmp_path}/lock does not name a run; remove it if no run"
    ):
        Lock(tmp_path)
    assert os.listdir(tmp_path) == ["lock"] and (tmp_path / "lock").read_text() == TEXTS[text]


@pytest.mark.parametrize("kind", ["pipe", "directory", "dangling link", "link", "huge"])
def test_a_lock_that_is_no_file(tmp_path, kind) -> None:
    """Oracle: the message; nothing is left in the directory, and a link's target stays."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text(written())
    if kind == "pipe":
        os.mkfifo(run / "lock")
    elif kind == "directory":
        (run / "lock").mkdir()
    elif kind == "huge":
        (run / "lock").write_text("")
        os.truncate(run / "lock", 2**40)
    else:
        (run / "lock").symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    reason = "it has .* bytes; at most" if kind == "huge" else f"it is a {kind.split()[-1]}, not a"
    with pytest.raises(OSError) as refused:
        Lock(run)
    assert str(refused.value).startswith(f"{run}/lock: ")
    assert re.search(reason, str(refused.value))
    assert os.listdir(run) == ["lock"] and outside.read_text() == written()


def test_a_dead_run_is_still_replaced(tmp_path) -> None:
    """Oracle: the new run's process in the lock; the old lock was last touched long ago."""
    path = tmp_path / "lock"
    path.write_text(written())
    os.utime(path, (0, 0))
    held = Lock(tmp_path)
    try:
        assert json.loads(path.read_text())["pid"] == os.getpid()
    finally:
        held.release()
    assert os.listdir(tmp_path) == []
