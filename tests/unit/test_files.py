"""How files are opened (regular files of bounded size, without waiting), and printable text."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpikfac import UserError, files


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"content")
    path.symlink_to(path.parent / "target")


MADE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
    "a socket": make_socket,
    "a link": make_link,
    "a device": lambda path: os.mknod(path, 0o20600, os.makedev(1, 3)),
}

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("mpikfac", "apps")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "files.py"
)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "file"


def make(kind: str, path: Path) -> None:
    try:
        MADE[kind](path)
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("kind", MADE)
def test_only_regular_files_are_opened(path, kind) -> None:
    """Oracle: the kind in the message; opening a pipe would wait for ever."""
    make(kind, path)
    for opened in (files.reading, files.writing, files.read_json):
        with pytest.raises(files.Refused, match=f"{path}: it is {kind}, not a regular file"):
            opened(path)
    if kind == "a link":
        assert (path.parent / "target").read_bytes() == b"content"


def test_a_link_that_the_user_names_is_followed(path) -> None:
    """Oracle: the content of the link's target; a pipe behind a link is refused."""
    make_link(path)
    assert files.read_bytes(path, links=True) == b"content"
    files.write_text(path, "new", named=True)
    assert (path.parent / "target").read_text() == "new"
    (path.parent / "target").unlink()
    os.mkfifo(path.parent / "target")
    with pytest.raises(files.Refused, match="it is a pipe"):
        files.read_bytes(path, links=True)


def test_devices_that_the_user_names_are_written() -> None:
    """Oracle: no error; /dev/null takes everything."""
    files.write_text("/dev/null", "text", named=True)


@pytest.mark.parametrize(
    ("begin", "expected"), [("empty", b"new"), ("end", b"oldnew"), ("new", None)]
)
def test_where_writing_begins(path, begin, expected) -> None:
    """Oracle: the file's content; "new" refuses a file that exists."""
    path.write_bytes(b"old")
    if expected is None:
        with pytest.raises(FileExistsError):
            files.writing(path, begin)
        path.unlink()
        expected = b"new"
    with files.writing(path, begin) as file:
        file.write(b"new")
    assert path.read_bytes() == expected


def test_large_files_are_refused_without_memory(path) -> None:
    """Oracle: the bytes of a file of holes, in the message."""
    with open(path, "wb") as file:
        file.truncate(12 * 2**30)
    with pytest.raises(files.Refused, match="it has 12,884,901,888 bytes; at most 262,144 are"):
        files.read_bytes(path)


def test_files_without_a_size_are_bounded() -> None:
    """Oracle: a file of /proc says that it has 0 bytes."""
    with pytest.raises(files.Refused, match="bytes; at most 1 are read"):
        files.read_bytes("/proc/self/status", 1)
    assert b"VmPeak" in files.read_bytes("/proc/self/status")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 33 + "]" * 33, "it has more than 32 levels"),
        ('{"a":' * 33 + "0" + "}" * 33, "it has more than 32 levels"),
        ("[" * 10**6, "it has more than 32 levels"),
        ("[1,\n2,]", "line 2 is not JSON"),
        ("1" * 5000, "integer"),
        (b"\xff\xfe\xfa", "it is not JSON"),
    ],
)
def test_json_is_bounded(text, message) -> None:
    """Oracle: one line; 32 levels are read."""
    with pytest.raises(ValueError, match=message) as refused:
        files.json_of(text)
    assert "\n" not in str(refused.value)
    deepest = files.json_of("[" * 32 + "]" * 32)
    assert str(deepest) == "[" * 32 + "]" * 32


def test_text_is_printable() -> None:
    """Oracle: codes of Python in place of characters that move a cursor or begin a line."""
    text = "a\x1b[2Jb\nc\x9bd\u202ee\udcff é 中"
    assert files.printable(text) == "a\\x1b[2Jb\\nc\\x9bd\\u202ee\\udcff é 中"
    assert files.printable_lines("a\r\nb") == "a\\r\nb"
    assert str(UserError(text)) == files.printable(text)


OPENING = {
    *("open", "io.open", "os.open", "os.fdopen", "np.load", "np.fromfile", "np.savez", "np.save"),
    *("torch.load", "torch.save", "logging.FileHandler", "yaml.load", "mmap.mmap"),
}
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "savefig", "tofile", "touch"}
# Files of /proc and /sys, of the package and in memory; directories; links; /dev/null.
ALLOWED = {
    *(
        "durable.py: os.open",
        "job.py: open",
        "metrics_file.py: open",
        "lock.py: read_text",
        "jobs.py: read_text",
        "memory.py: read_text",  # of the kernel
        "memory.py: write_text",
        "mpi.py: read_text",
        "processes.py: read_text",
        "processes.py: read_bytes",
    ),
    *("checks.py: read_bytes", "pages.py: read_text", "machine.py: read_text"),
    *("cli.py: os.open", "cli.py: os.fdopen", "reports.py: os.open", "counter.py: open"),
    *(
        "text.py: os.open",
        "cache.py: os.open",
        "datasets.py: np.load",
        "worker.py: mmap.mmap",
        "counter.py: mmap.mmap",
    ),
    *("export.py: torch.save", "export.py: np.savez", "weights.py: torch.load"),
    *("cli.py: savefig", "style.py: savefig"),
}


def opened(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that open a file without `mpikfac.files`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner, _, method = name.rpartition(".")
            if name in OPENING:
                yield name
            elif method in METHODS and owner != "files":
                yield method


@pytest.mark.gate
def test_all_files_are_opened_in_one_place() -> None:
    """Oracle: the syntax trees; `mpikfac/files.py` opens all files but those above."""
    trees = [(source.name, ast.parse(source.read_text())) for source in SOURCES]
    assert {f"{name}: {call}" for name, tree in trees for call in opened(tree)} - ALLOWED == set()
