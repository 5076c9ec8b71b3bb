"""Open files: regular files only, of bounded size, and without links in a run's directories.

A pipe may make a reader wait for ever, a device may do anything, a file made of holes may fill the
memory, and a link may lead out of a run's directory. So the library and the programs open all files
by `reading` and `writing`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any, Literal

LIMIT = 2**25
"""Bytes of the largest JSON that is read; about 200,000 items of a checkpoint's manifest."""
SMALL = 2**18
"""Bytes of the largest small file that is read: a lock, options, a study."""
HUGE = 2**62
"""The largest number of a `form`."""
DEEP = 32
"""Levels of the deepest JSON and YAML that is read."""

KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
BEGIN = {"empty": 0, "new": os.O_EXCL, "end": os.O_APPEND}


class Refused(OSError):
    """Report a file that is not opened; `strerror` is the reason, and `filename` the path."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def reading(path: str | Path, limit: int | None = None, links: bool = False) -> io.BufferedReader:
    """Open a regular file to read; opening never waits.

    Args:
        limit: bytes of the largest file that is opened; None for no limit.
        links: follow a link at the end of `path`. For paths that a user names, not for files of a
            run's directory.

    Raises:
        Refused: the path is no regular file, or the file is too large.
        OSError: the file cannot be opened.
    """
    descriptor = _opened(path, os.O_RDONLY, links)
    size = os.fstat(descriptor).st_size
    if limit is not None and size > limit:
        os.close(descriptor)
        raise _too_large(path, size, limit)
    return os.fdopen(descriptor, "rb")


def writing(
    path: str | Path, begin: Literal["empty", "new", "end"] = "empty", *, named: bool = False
) -> io.FileIO:
    """Open a regular file to write, without a buffer; opening never waits.

    Args:
        begin: "empty" drops the file's content, "new" refuses an existing file, and "end" adds to
            the content.
        named: the user named the path: links are followed, and devices are taken.

    Raises:
        Refused: the path is no regular file.
        OSError: the file cannot be opened.
    """
    descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | BEGIN[begin], named, devices=named)
    if begin == "empty" and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.ftruncate(descriptor, 0)
    return io.FileIO(descriptor, "ab" if begin == "end" else "wb")


def anchored(path: Path) -> Path:
    """Return a path to the same name in the same folder, also once the folder has moved.

    The folder stays open until the process ends.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return Path(f"/proc/self/fd/{folder}", path.name)


def names(path: str | Path, file: io.IOBase) -> bool:
    """Return whether the path leads to the open file; False if the file was renamed or removed."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def read_bytes(path: str | Path, limit: int = SMALL, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        Refused: the path is no regular file, or the file is too large.
        OSError: the file cannot be read.
    """
    with reading(path, limit, links) as file:
        content = file.read(limit + 1)  # the file may grow meanwhile
    if len(content) > limit:
        raise _too_large(path, len(content), limit)
    return content


def read_text(path: str | Path, limit: int = SMALL, links: bool = False) -> str:
    """Return the text of a regular file in UTF-8, of at most `limit` bytes.

    Raises:
        Refused: the path is no regular file, or the file is too large.
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not in UTF-8.
    """
    return read_bytes(path, limit, links).decode()


def read_json(path: str | Path, limit: int = LIMIT, links: bool = False) -> Any:
    """Return the content of a JSON file of at most `limit` bytes and `DEEP` levels.

    Raises:
        Refused: the path is no regular file, or the file is too large.
        OSError: the file cannot be read.
        ValueError: the file is no JSON, or has too many levels; the text lacks the path.
    """
    return json_of(read_bytes(path, limit, links))


def read_form(path: str | Path, form: Any, limit: int = LIMIT) -> Any:
    """Return the content of a JSON file that `has_form`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no JSON of the form; the text names the path.
    """
    try:
        content = read_json(path, limit)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; delete the file: {error}") from error
    if not has_form(content, form):
        raise ValueError(f"{path} is damaged; delete the file: it has another form")
    return content


def has_form(content: Any, form: Any) -> bool:
    """Return whether the content of a JSON file has a form.

    Args:
        form: `str`, `int` or `object`; `float` for any number that is no huge one; `[form]` for a
            list; `{str: form}` for an object with any keys; `{"key": form}` for an object with at
            least these keys; a tuple of forms, for any of the forms; None for null.
    """
    if isinstance(form, tuple):
        return any(has_form(content, alternative) for alternative in form)
    if isinstance(form, list):
        return isinstance(content, list) and all(has_form(element, form[0]) for element in content)
    if isinstance(form, dict):
        if not isinstance(content, dict):
            return False
        if str in form:
            return all(has_form(element, form[str]) for element in content.values())
        return all(key in content and has_form(content[key], inner) for key, inner in form.items())
    if form is float:
        return type(content) in (int, float) and abs(content) <= HUGE
    if form is int:
        return type(content) is int and abs(content) <= HUGE
    return content is None if form is None else isinstance(content, form)


def json_of(text: bytes | str) -> Any:
    """Return the content of a JSON text of at most `DEEP` levels.

    Raises:
        ValueError: the text is no JSON, or has too many levels.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is no JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no JSON: {error.reason}") from error
    except RecursionError:
        raise ValueError(f"it has more than {DEEP} levels") from None
    if _levels(content) > DEEP:
        raise ValueError(f"it has more than {DEEP} levels")
    return content


def write_bytes(path: str | Path, content: bytes | memoryview, *, named: bool = False) -> None:
    """Replace the content of a file, see `writing`; a failure may leave a part.

    Raises:
        OSError: the file cannot be written.
    """
    with writing(path, named=named) as file:
        write_all(file, content, path)


def write_all(file: io.FileIO, content: bytes | memoryview, path: str | Path) -> None:
    """Write the content at the place of an open file, see `write_bytes`.

    Raises:
        OSError: the file cannot be written; the error has the path.
    """
    remaining = memoryview(content)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        error.filename = str(path)  # the system names a file only if opening fails
        raise


def write_text(path: str | Path, text: str, *, named: bool = False) -> None:
    """Replace the content of a file by a text in UTF-8, see `writing`.

    Raises:
        OSError: the file cannot be written.
    """
    write_bytes(path, text.encode(), named=named)


def why(error: OSError) -> str:
    """Return the reason of an error of the file system, without number and path."""
    return error.strerror or str(error)


def one_line(error: Exception) -> str:
    """Return the text of an error on a single line, or the error's type if the text is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    r"""Return the text with codes such as `\n` and `\x1b` for all characters that do not print.

    Text from a file could otherwise move the cursor, hide a line, or look like a second message.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return the lines of a text, each line as `printable` returns the line."""
    return "\n".join(map(printable, text.split("\n")))


def _opened(path: str | Path, flags: int, links: bool, devices: bool = False) -> int:
    """Return a descriptor, after a check before opening: opening a device may have effects."""
    try:
        _check(path, os.stat(path, follow_symlinks=links).st_mode, devices)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    plain = 0 if links else os.O_NOFOLLOW
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | plain
    descriptor = os.open(path, flags, 0o666)
    try:
        _check(path, os.fstat(descriptor).st_mode, devices)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str | Path, mode: int, devices: bool) -> None:
    kind = stat.S_IFMT(mode)
    taken = {stat.S_IFREG} | ({stat.S_IFCHR, stat.S_IFIFO} if devices else set())
    if kind not in taken:
        raise Refused(path, f"it is {KINDS.get(kind, 'something else')}, not a regular file")


def _too_large(path: str | Path, size: int, limit: int) -> Refused:
    return Refused(path, f"it has {size:,} bytes; at most {limit:,} are read")


def _levels(content: Any) -> int:
    """Return the levels of lists and objects in JSON; at most `DEEP` + 1 are counted."""
    level, levels = [content], 0
    while levels <= DEEP and (
        level := [nested for nested in level if isinstance(nested, dict | list)]
    ):
        levels += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return levels
