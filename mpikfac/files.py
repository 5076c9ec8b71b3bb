"""Open files safely: only regular files of bounded size, and no links in run directories.

A pipe can block a reader forever, opening a device can have side effects, a sparse file can fill
the memory, and a link can lead out of a run's directory. The library and the programs therefore
open all files with `reading` and `writing`.
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
"""Maximum size of a JSON file in bytes; enough for a manifest of about 200,000 items."""
SMALL = 2**18
"""Maximum size in bytes of a small file, such as a lock, an options file or a study."""
HUGE = 2**62
"""Maximum absolute value of a number that `has_form` accepts."""
DEEP = 32
"""Maximum nesting depth of JSON and YAML files."""

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
    """Report that a file must not be opened; `strerror` is the reason, and `filename` the path."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def reading(path: str | Path, limit: int | None = None, links: bool = False) -> io.BufferedReader:
    """Open a regular file for reading; opening never blocks.

    Args:
        limit: maximum size of the file in bytes; None for no limit.
        links: whether to follow a link at the end of `path`; use this for paths that a user passes,
            not for files in a run's directory.

    Raises:
        Refused: the path is not a regular file, or the file is too large.
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
    """Open a regular file for unbuffered writing; opening never blocks.

    Args:
        begin: "empty" truncates the file, "new" fails if the file exists, and "end" appends to the
            file.
        named: whether a user passed the path; if so, links are followed, and devices and pipes
            are accepted.

    Raises:
        Refused: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | BEGIN[begin], named, devices=named)
    if begin == "empty" and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.ftruncate(descriptor, 0)
    return io.FileIO(descriptor, "ab" if begin == "end" else "wb")


def anchored(path: Path) -> Path:
    """Return an equivalent path that stays valid if the file's folder is moved.

    The folder stays open until the process ends.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return Path(f"/proc/self/fd/{folder}", path.name)


def names(path: str | Path, file: io.IOBase) -> bool:
    """Return whether the path refers to the open file; False if the file was renamed or removed."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def read_bytes(path: str | Path, limit: int = SMALL, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        Refused: the path is not a regular file, or the file is too large.
        OSError: the file cannot be read.
    """
    with reading(path, limit, links) as file:
        content = file.read(limit + 1)  # the file can grow in the meantime
    if len(content) > limit:
        raise _too_large(path, len(content), limit)
    return content


def read_text(path: str | Path, limit: int = SMALL, links: bool = False) -> str:
    """Return the UTF-8 text of a regular file of at most `limit` bytes.

    Raises:
        Refused: the path is not a regular file, or the file is too large.
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, limit, links).decode()


def read_json(path: str | Path, limit: int = LIMIT, links: bool = False) -> Any:
    """Return the content of a JSON file of at most `limit` bytes and `DEEP` levels of nesting.

    Raises:
        Refused: the path is not a regular file, or the file is too large.
        OSError: the file cannot be read.
        ValueError: the file is not JSON, or nested too deeply; the message does not contain the
            path.
    """
    return json_of(read_bytes(path, limit, links))


def read_form(path: str | Path, form: Any, limit: int = LIMIT) -> Any:
    """Return the content of a JSON file, which must match the schema `form`; see `has_form`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON, or does not match the schema; the message names the path.
    """
    try:
        content = read_json(path, limit)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; delete the file: {error}") from error
    if not has_form(content, form):
        raise ValueError(f"{path} is damaged; delete the file: it has an unexpected form")
    return content


def has_form(content: Any, form: Any) -> bool:
    """Return whether the content of a JSON file matches a schema.

    Args:
        form: the schema: `str`; `int` for an integer or `float` for any number, of at most `HUGE`
            in absolute value; `object` for any content; `[form]` for a list; `{str: form}` for an
            object with any keys; `{"key": form}` for an object with at least these keys; a tuple of
            schemas, for any of them; None for null.
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
    """Parse a JSON text of at most `DEEP` levels of nesting.

    Raises:
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not JSON: {error.reason}") from error
    except RecursionError:
        raise ValueError(f"it has more than {DEEP} levels") from None
    if _levels(content) > DEEP:
        raise ValueError(f"it has more than {DEEP} levels")
    return content


def write_bytes(path: str | Path, content: bytes | memoryview, *, named: bool = False) -> None:
    """Replace the content of a file (see `writing`); after a failure, the file may be incomplete.

    Raises:
        OSError: the file cannot be written.
    """
    with writing(path, named=named) as file:
        write_all(file, content, path)


def write_all(file: io.FileIO, content: bytes | memoryview, path: str | Path) -> None:
    """Write the content at the current position of an open file; see `write_bytes`.

    Raises:
        OSError: the file cannot be written; the error contains the path.
    """
    remaining = memoryview(content)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        error.filename = str(path)  # the system names the file only if opening fails
        raise


def write_text(path: str | Path, text: str, *, named: bool = False) -> None:
    """Replace the content of a file with a UTF-8 text; see `writing`.

    Raises:
        OSError: the file cannot be written.
    """
    write_bytes(path, text.encode(), named=named)


def why(error: OSError) -> str:
    """Return the reason for a file-system error, without the error number and the path."""
    return error.strerror or str(error)


def one_line(error: Exception) -> str:
    """Return the text of an error on a single line, or the error's type if the text is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    r"""Return the text with unprintable characters replaced by escapes such as `\n` and `\x1b`.

    Text from a file could otherwise move the cursor, hide a line, or look like a second message.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def _opened(path: str | Path, flags: int, links: bool, devices: bool = False) -> int:
    """Open a file; first check its type, because opening a device can have side effects.

    Returns:
        The file descriptor.
    """
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
    """Return the nesting depth of lists and objects in JSON; counting stops at `DEEP` + 1."""
    level, levels = [content], 0
    while levels <= DEEP:
        level = [nested for nested in level if isinstance(nested, dict | list)]
        if not level:
            break
        levels += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return levels
