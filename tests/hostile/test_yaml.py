"""YAML of options and studies: bounded in bytes, levels and values, and refused in one line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpikfac_apps.lab.study import spec, study
from mpikfac_apps.options import documents
from mpikfac_apps.options.parse import parse
from support.pace import paced

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 4000))
TEXTS = {
    "alias bomb": (
        BOMB,
        "line 4 is .* YAML: it has more than 10,000 values, with aliases expanded",
    ),
    "chain of aliases": (CHAIN, "it has more than 32 levels"),
    "list in itself": ("a: &a [*a]\n", "an alias is inside its own anchor"),
    "mapping in itself": ("a: &a\n  b: *a\n", "an alias is inside its own anchor"),
    "merged in itself": ("a: &a\n  <<: *a\n", "an alias is inside its own anchor"),
    "many levels": ("[" * 200_000, "it has more than 32 levels"),
    "many levels of lines": ("- " * 100_000, "it has more than 32 levels"),
    "many values": ("- a\n" * 60_000, "it has more than 10,000 values"),
    "an object": ("a: !!python/object/apply:os.system [date]\n", "is not plain data"),
    "bytes": ("a: !!binary x\n", "is not plain data"),
    "no number": ("a: !!int x\n", "'x' is not a value of type int"),
    "no truth": ("a: !!bool x\n", "'x' is not a value of type bool"),
    "long number": ("a: " + "9" * 5000 + "\n", "is not a value of type int"),
    "key of a list": ("? [a]\n: b\n", "found unhashable key"),
    "two documents": ("a: 1\n---\na: 2\n", "but found another document"),
    "escape": ("a: \x1b[2J\n", "special characters are not allowed"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("read", ["options", "study"])
def test_a_text_that_would_take_memory_or_time(tmp_path, name, read) -> None:
    """Oracle: one line with the file, in less than 5 seconds."""
    text, message = TEXTS[name]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ValueError, match=message) as refused:
        parse([f"--config={path}"], 1) if read == "options" else spec.read(path)
    assert time.monotonic() - began < paced(5)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_anchors_may_be_used() -> None:
    """Oracle: the same document, written out; a day is a text."""
    text = "a: &a {x: 1, y: [2]}\nb: *a\nc: {<<: *a, x: 3}\nd: 2026-01-01\n"
    plain = {"x": 1, "y": [2]}
    expected = {"a": plain, "b": plain, "c": {"x": 3, "y": [2]}, "d": "2026-01-01"}
    assert documents.loaded(text) == expected


def huge(path: Path) -> None:
    path.write_text("")
    os.truncate(path, 2**40)


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "it is a pipe, not a regular file"),
    "directory": (os.mkdir, "it is a directory, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    "huge": (huge, "it has 1,099,511,627,776 bytes; at most 262,144 are read"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "No such file"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_of_text(tmp_path, capsys, kind) -> None:
    """Oracle: one line with the path and the kind; a link that the user names is followed."""
    make, message = NO_FILES[kind]
    path = tmp_path / "file.yaml"
    make(path)
    with pytest.raises(ValueError, match=f"config={path} cannot be read: {message}"):
        parse([f"--config={path}"], 1)
    assert study.main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and message in line
    (tmp_path / "good.yaml").write_text("lr: 0.5\nbatch: 12\n")
    path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
    path.symlink_to(tmp_path / "good.yaml")
    assert parse([f"--config={path}"], 1).lr == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matrix: {strategy: [{a: 1}], ranks: [1]}", "unknown strategy {'a': 1}"),
        ("matrix: {strategy: [[sgd]], ranks: [1]}", "unknown strategy ['sgd']"),
        ("matrix: {strategy: [1], ranks: [1]}\nstrategies: {1: {lr: 1}}", "unknown strategy 1"),
        ("matrix: {strategy: [sgd], ranks: [1], lr: [2026-01-01]}", "lr=2026-01-01 must be"),
        ("matrix: {strategy: [sgd], ranks: [1], 5: [1]}", "unknown key 5"),
        ("options: {[a]: 1}\nmatrix: 1", "unhashable key"),
        ("base: [a]", "base=['a'] is not a file"),
        ('"\\e[2J\\n": 1', "unknown key \\x1b[2J\\n"),
    ],
)
def test_values_that_no_study_has(tmp_path, capsys, text, message) -> None:
    """Oracle: one printable line with the value."""
    (tmp_path / "study.yaml").write_text(text)
    assert study.main([str(tmp_path / "study.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.isprintable()
