"""The layering of the house, read from the syntax trees: who may import what, and docstrings."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpikfac

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "mpikfac").rglob("*.py"))
PROGRAMS = sorted((ROOT / "apps").rglob("*.py"))
# The table of docs/architecture.md: what a module may import beside the standard library.
MAY_IMPORT = {
    "__init__": set(),
    "__main__": set(),  # hands over to programs, by name
    "layout": set(),
    "strategy": set(),
    "messages": {"layout"},
    "levels": {"messages"},
    "plan": {"layout", "levels", "messages", "strategy"},
    "schedule": set(),
    "machine": {"numpy"},
    "costmodel": {"messages", "machine", "plan"},
    "tuning": {"costmodel", "layout", "machine", "plan", "simulator", "strategy"},
    "simulator": {"messages", "costmodel", "machine", "plan"},
    "moments": {"torch", "kron"},
    "convolution": {"torch", "kron", "moments"},
    "kron": {"torch"},
    "decompose": {"torch", "kron", "plan", "troubles"},
    "background": {"torch"},
    "curvature": {"torch", "arena", "comm", "decompose", "layout", "plan", "trace"},
    "bases": {
        *("torch", "arena", "background", "curvature", "decompose", "kron", "plan", "troubles"),
    },
    "layers": {"torch", "layout", "plan", "moments", "convolution"},
    "arena": {"torch", "layout"},
    "trace": {"torch"},
    "timeline": {"trace"},
    "errors": set(),
    "troubles": {"torch", "errors"},
    "outbox": set(),
    "codecs": {"torch", "layout", "messages"},
    "encoded": {"torch", "codecs", "messages"},
    "comm": {
        *("mpi4py", "torch", "encoded", "errors", "layout", "levels", "messages", "outbox"),
        "trace",
    },
    "recorder": {"torch", "arena", "kron", "layers", "moments", "trace"},
    "state": {"torch"},
    "checks": {"torch", "mpikfac", "comm", "layers", "state"},
    "data_parallel": {
        *("torch", "arena", "checks", "comm", "layers", "layout", "plan", "state", "strategy"),
        *("trace", "troubles"),
    },
    "factors": {"torch", "arena", "comm", "kron", "plan", "troubles"},
    "kfac": {
        *("torch", "arena", "bases", "checks", "comm", "curvature", "data_parallel", "factors"),
        "kron",
        *("layers", "messages", "moments", "plan", "recorder", "schedule", "state", "strategy"),
        *("trace", "troubles"),
    },
    "durable": set(),
    "shard": {"blake3", "h5py", "numpy", "torch", "durable", "errors"},
    "manifest": {"blake3", "durable", "errors", "shard"},
    "starts": {"durable", "manifest"},
    "checkpoint": {"torch", "comm", "durable", "errors", "manifest", "shard", "starts"},
}
INHERITED = ("forward", "emit", "find_class")  # what they do is said where they are first defined


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever it does; a module's parts as `module.part`.

    What is taken from `mpikfac` as an attribute counts as imported too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "mpikfac":
            yield f"mpikfac.{node.attr}"


def unlisted(tree: ast.AST, allowed: set[str]) -> set[str]:
    """Modules that a file of the library imports though they are neither standard nor allowed."""
    found = set()
    for name in imported(tree):
        package, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if package == "mpikfac" and part in MAY_IMPORT:
            found.add(part)
        elif package not in sys.stdlib_module_names:
            found.add(package)
    return found - allowed


def private(tree: ast.AST) -> set[str]:
    """What a program imports though `mpikfac` does not export it, and MPI and HDF5."""
    public = {"mpikfac", *(f"mpikfac.{name}" for name in mpikfac.__all__)}
    closed = ("mpikfac", "mpi4py", "h5py")
    return {name for name in imported(tree) if name.partition(".")[0] in closed} - public


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def undocumented(tree: ast.AST) -> Iterator[str]:
    """Public functions and classes without docstring, those of public classes included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_") or node.name in INHERITED:
                continue
            if not ast.get_docstring(node):
                yield f"{node.name} (line {node.lineno})"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.name)
def test_library_imports(path):
    """Oracle: the table of docs/architecture.md."""
    assert unlisted(parse(path), MAY_IMPORT[path.stem]) == set()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_use_the_public_library(path):
    """Programs see what users see: the names that `mpikfac` itself exports, and no MPI or HDF5."""
    assert private(parse(path)) == set()


@pytest.mark.parametrize(
    "line",
    [
        *("from mpikfac import kron", "import mpikfac.comm", "from mpikfac.comm import agree"),
        "from mpikfac import trace",  # the standard library has a module of that name
        *("import mpikfac; mpikfac.comm.agree", "from mpi4py import MPI", "import h5py as h"),
    ],
)
def test_a_way_around_the_house_is_seen(line):
    """Oracle: ways to reach a module of the library, MPI or HDF5."""
    assert private(ast.parse(line))
    assert unlisted(ast.parse(line), {"mpikfac"})


@pytest.mark.parametrize("path", LIBRARY + PROGRAMS, ids=lambda path: path.name)
def test_public_functions_have_docstrings(path):
    tree = parse(path)
    assert ast.get_docstring(tree) or not tree.body, f"{path.name} has no docstring"
    assert list(undocumented(tree)) == []
