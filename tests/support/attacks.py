"""Damage a file at random: its bytes, values of JSON and YAML, or the kind of file.

An attack is a function of a path and a random generator that returns what was done. The same seed
gives the same attack.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from blake3 import blake3

from support.forgery import manifest_of, seal

Attack = Callable[[Path, random.Random], str]

DEEP: Any = 0
for _ in range(60):
    DEEP = [DEEP]
STRANGE = (
    *(None, True, -1, 0, 1, 0.5, 2**31, 2**53 + 1, 2**62, -(2**63), 10**30, 10**400),
    *(math.nan, math.inf, 1e300, "", "x", "\x1b[2J\r\n\x9b", "../../outside", "/dev/zero"),
    *("\udcff", "a" * 10_000, [], {}, [[]], [0] * 1000, {"": 0}, {"\x1b]0;x\x07": "\n"}, DEEP),
)


TOKENS = (
    *(b"[", b"{", b"]", b"}", b":", b",", b'"', b"'", b"&a ", b"*a", b"- ", b"? ", b"!!int "),
    *(b"\n", b"\x1b[2J", b"\0", b"\xff", b"9" * 5000, b"e999", b"[" * 5000, b"  ", b"---\n"),
)

# -- bytes ---------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> str:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"flip a bit of byte {place}"


def cut(path: Path, chance: random.Random) -> str:
    """Truncate the file, often to nothing."""
    size = chance.choice([0, chance.randrange(path.stat().st_size)])
    os.truncate(path, size)
    return f"cut to {size} bytes"


def blank(path: Path, chance: random.Random) -> str:
    """Fill a part with zeros."""
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    stop = min(len(content), start + chance.choice([1, 8, 512, 4096]))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)
    return f"zeros from {start} to {stop}"


def noise(path: Path, chance: random.Random) -> str:
    """Write random bytes somewhere in the file, or replace the file with them."""
    content = path.read_bytes()
    start = chance.randrange(len(content))
    stop = chance.choice([start, start + 1, start + 16, len(content)])
    extra = chance.randbytes(chance.choice([1, 4, 64, 5000]))
    path.write_bytes(content[:start] + extra + content[stop:])
    return f"{len(extra)} random bytes for {start} to {stop}"


def repeat(path: Path, chance: random.Random) -> str:
    """Repeat a part of the file."""
    content = path.read_bytes()
    start = chance.randrange(len(content))
    part = content[start : start + chance.choice([1, 10, 1000])] * chance.choice([1, 10, 1000])
    path.write_bytes(content[:start] + part + content[start:])
    return f"repeat {len(part)} bytes at {start}"


def token(path: Path, chance: random.Random) -> str:
    """Insert a token of a text format into the file."""
    content = path.read_bytes()
    word, place = chance.choice(TOKENS), chance.randrange(len(content) + 1)
    path.write_bytes(content[:place] + word + content[place:])
    return f"{word[:10]!r} ({len(word)} bytes) at {place}"


BYTES = (flip, cut, blank, noise, repeat, token)


# -- values --------------------------------------------------------------------------------------


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each value inside a document."""
    if isinstance(content, dict | list):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from places(content[key])


def change_value(content: Any, chance: random.Random) -> tuple[Any, str]:
    """Return the document with a value changed, added or removed, and what was done."""
    found = list(places(content))
    strange = chance.choice(STRANGE)
    if not found or chance.random() < 0.05:
        return strange, f"all is {repr(strange)[:60]}"
    # The few values near the root are chosen as often as the many values of long lists.
    inside, key = found[int(len(found) ** chance.random()) - 1]
    kind = chance.random()
    if kind < 0.15:
        del inside[key]
        return content, f"{str(key)[:60]!r} removed"
    if kind < 0.25 and isinstance(inside, dict):
        inside[str(strange)[:1000]] = inside[key]
        return content, f"key {repr(strange)[:60]} added"
    inside[key] = strange
    return content, f"{str(key)[:60]!r} is {repr(strange)[:60]}"


def change_json(path: Path, chance: random.Random) -> str:
    """Change a value of a JSON file."""
    content, done = change_value(json.loads(path.read_text()), chance)
    path.write_text(json.dumps(content))
    return done


def change_line(path: Path, chance: random.Random) -> str:
    """Change a value in a line of a file of JSON lines."""
    lines = path.read_text().splitlines()
    number = chance.randrange(len(lines))
    content, done = change_value(json.loads(lines[number]), chance)
    lines[number] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return f"line {number}: {done}"


def change_yaml(path: Path, chance: random.Random) -> str:
    """Change a value of a YAML file."""
    content, done = change_value(yaml.safe_load(path.read_text()), chance)
    path.write_text(yaml.safe_dump(content), errors="surrogateescape")
    return done


def change_manifest(path: Path, chance: random.Random) -> str:
    """Change a value of a manifest, and give the manifest a matching digest."""
    content, done = change_value(manifest_of(path.parent), chance)
    if not isinstance(content, dict):
        path.write_text(json.dumps(content))
        return done
    seal(path.parent, content)
    return f"sealed: {done}"


def change_shard(path: Path, chance: random.Random) -> str:
    """Damage a shard, and give the manifest the digest of the damaged shard."""
    done = chance.choice([flip, blank, noise, repeat, cut])(path, chance)
    manifest, content = manifest_of(path.parent), path.read_bytes()
    digest = blake3(content).hexdigest()
    manifest["shards"][path.name] = {"size": len(content), "digest": digest}
    seal(path.parent, manifest)
    return f"sealed: {done}"


# -- replacements of the file --------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def a_socket(path: Path) -> None:
    """Create a socket."""
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_PATH)  # the paths of sockets must be short
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def holes(path: Path, size: int) -> None:
    """Create a large sparse file."""
    path.write_bytes(b"")
    os.truncate(path, size)


def replace(path: Path, chance: random.Random) -> str:
    """Replace a file with a link, a pipe, a folder or something else."""
    outside = next((up / "outside" for up in path.parents if (up / "outside").exists()), "x")
    kinds: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a folder with a file": lambda: (path.mkdir(), (path / "x").write_text("")),
        "a socket": lambda: a_socket(path),
        "a link to nothing": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path),
        "a link to a device": lambda: path.symlink_to("/dev/zero"),
        "a link to a file": lambda: path.symlink_to(outside),
        "a link to a folder": lambda: path.symlink_to("."),
        "a TiB of holes": lambda: holes(path, 2**40),
        "a GiB of holes": lambda: holes(path, 2**30),
    }
    kind = chance.choice(list(kinds))
    remove(path)
    kinds[kind]()
    return kind
