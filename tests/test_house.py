"""The layering of the house, read from the syntax trees: who may import what, and docstrings."""

from __future__ import annotations

import ast
import configparser
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpikfac

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "mpikfac").rglob("*.py"))
PROGRAMS = sorted((ROOT / "apps").rglob("*.py"))
# The table of docs/architecture.md: what a module may import beside the standard library.
# The modules of a package are for that package alone: others import what it exports.
MAY_IMPORT = {
    "__init__": set(),
    "layout": set(),
    "strategy": set(),
    "catalogue": {"strategy"},
    "messages": {"layout"},
    "levels": {"messages"},
    "shapes": {"layout"},
    "placement": {"layout", "shapes", "strategy"},
    "roles": {"layout", "levels", "shapes", "strategy"},
    "holdings": {"layout", "roles", "shapes"},
    "plan": {"holdings", "layout", "levels", "messages", "placement", "shapes", "strategy"},
    "schedule": set(),
    "adaptation": set(),
    "machine": {"numpy"},
    "costmodel": {"messages", "machine", "plan", "shapes"},
    "tuning": {
        *("catalogue", "costmodel", "layout", "machine", "plan", "shapes", "simulator"),
        "strategy",
    },
    "simulator": {"messages", "costmodel", "machine", "plan"},
    "moments": {"torch", "kron"},
    "window": {"torch"},
    "correlation": {"torch", "window"},
    "convolution": {"torch", "correlation", "kron", "moments", "window"},
    "fisher": {"torch"},
    "estimator": {"torch", "fisher", "moments", "strategy"},
    "kron": {"torch"},
    "decompose": {"torch", "kron", "shapes", "troubles"},
    "background": {"torch"},
    "curvature": {"torch", "arena", "comm", "decompose", "layout", "plan", "shapes", "trace"},
    "bases": {
        *("torch", "arena", "background", "curvature", "decompose", "kron", "plan", "shapes"),
        "troubles",
    },
    "layers": {
        *("layers.convolutional", "layers.covering", "layers.embedding", "layers.layer"),
        *("layers.normalization", "layers.others"),
    },
    "layers.attention": {"torch", "layers.layer"},
    "layers.others": {"torch"},
    "layers.layer": {"torch", "layers.others", "moments", "shapes"},
    "layers.convolutional": {"torch", "convolution", "layers.layer", "shapes", "window"},
    "layers.embedding": {"torch", "layers.layer", "shapes"},
    "layers.normalization": {"torch", "layers.layer", "moments", "shapes"},
    "layers.covering": {
        *("torch", "layers.attention", "layers.convolutional", "layers.embedding", "layers.layer"),
        *("layers.normalization", "layers.others", "layout", "shapes"),
    },
    "precision": {"torch"},
    "arena": {"torch", "layout"},
    "trace": {"torch"},
    "timeline": {"trace"},
    "errors": set(),
    "troubles": {"torch", "errors"},
    "outbox": set(),
    "codecs": {"torch", "layout", "messages"},
    "comm": {
        *("comm.agreement", "comm.buffers", "comm.grid", "comm.intercomm", "comm.startup"),
        "comm.survival",
    },
    "comm.startup": {"mpi4py", "torch", "errors"},
    "comm.buffers": {"torch", "trace"},
    "comm.agreement": {"mpi4py", "torch", "comm.buffers", "errors"},
    "comm.intercomm": {"mpi4py", "torch", "comm.buffers"},
    "comm.primitives": {"mpi4py", "torch", "comm.buffers", "messages"},
    "comm.encoded": {"mpi4py", "torch", "codecs", "comm.buffers", "messages"},
    "comm.beside": {"mpi4py", "torch", "comm.buffers", "layout", "messages", "outbox", "trace"},
    "comm.grid": {
        *("mpi4py", "torch", "comm.beside", "comm.buffers", "comm.encoded", "comm.primitives"),
        *("comm.startup", "layout", "levels", "messages", "trace"),
    },
    "comm.survival": {"mpi4py", "comm.grid", "errors"},
    "recorder": {
        *("torch", "arena", "estimator", "kron", "layers", "precision", "shapes", "trace"),
    },
    "grafting": {"torch", "arena", "layout", "plan", "shapes"},
    "directions": {
        *("torch", "adaptation", "arena", "bases", "checks", "comm", "data_parallel", "grafting"),
        *("kron", "layers", "plan", "schedule", "shapes", "troubles"),
    },
    "state": {"torch"},
    "checks": {
        *("torch", "mpikfac", "adaptation", "comm", "estimator", "grafting", "layers", "shapes"),
        *("state", "strategy"),
    },
    "data_parallel": {
        *("torch", "arena", "checks", "comm", "layers", "layout", "plan", "precision", "state"),
        *("strategy", "trace", "troubles"),
    },
    "factors": {"torch", "arena", "comm", "kron", "plan", "shapes", "troubles"},
    "scales": {
        *("torch", "arena", "bases", "comm", "factors", "kron", "layers", "plan", "shapes"),
        "troubles",
    },
    "kfac": {
        *(
            "torch",
            "adaptation",
            "bases",
            "checks",
            "comm",
            "curvature",
            "data_parallel",
            "precision",
            "recorder",
            "scales",
        ),
        *("directions", "estimator", "factors", "fisher", "grafting", "layers", "moments"),
        *("plan", "schedule", "shapes", "state", "strategy", "trace", "troubles"),
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
        package, *rest = name.split(".")
        parts = [".".join(rest[:count]) for count in range(len(rest), 0, -1)]
        module = next((part for part in parts if part in MAY_IMPORT), None)
        if package == "mpikfac" and module:
            found.add(module)
        elif package not in sys.stdlib_module_names:
            found.add(package)
    return found - allowed


def private(tree: ast.AST) -> set[str]:
    """What a program imports though `mpikfac` does not export it, and MPI and HDF5."""
    public = {"mpikfac", *(f"mpikfac.{name}" for name in mpikfac.__all__)}
    closed = ("mpikfac", "mpi4py", "h5py")
    return {name for name in imported(tree) if name.partition(".")[0] in closed} - public


def module_of(path: Path) -> str:
    """A file's name in the table: a package's for its `__init__`, but for that of `mpikfac`."""
    *packages, name = path.relative_to(ROOT / "mpikfac").with_suffix("").parts
    return ".".join(packages if packages and name == "__init__" else [*packages, name])


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


@pytest.mark.parametrize("path", LIBRARY, ids=module_of)
def test_library_imports(path):
    """Oracle: the table of docs/architecture.md."""
    assert unlisted(parse(path), MAY_IMPORT[module_of(path)]) == set()


@pytest.mark.parametrize(("package", "importer"), [("mpi4py", "comm"), ("h5py", "shard")])
def test_some_packages_have_one_importer(package, importer):
    """Oracle: the table of docs/architecture.md, in which `comm` is one, with all its modules."""
    found = {module.partition(".")[0] for module in MAY_IMPORT if package in MAY_IMPORT[module]}
    assert found == {importer}


def test_all_packages_are_installed():
    """Oracle: the folders. An installation for editing misses none that is left out."""
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    library = {path.parent.relative_to(ROOT) for path in LIBRARY}
    programs = {path.parent.relative_to(ROOT / "apps") for path in PROGRAMS} - {Path()}
    listed = options["options"]["packages"].split()
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in library | programs)


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


@pytest.mark.parametrize(
    "line",
    [
        "import mpikfac.comm.grid",
        "from mpikfac.comm import grid",
        "from mpikfac.comm.grid import x",
    ],
)
def test_a_way_into_a_package_is_seen(line):
    """Oracle: ways to reach a module of a package by one that may import the package."""
    assert unlisted(ast.parse(line), {"comm"}) == {"comm.grid"}


@pytest.mark.parametrize("path", LIBRARY + PROGRAMS, ids=lambda path: path.name)
def test_public_functions_have_docstrings(path):
    tree = parse(path)
    assert ast.get_docstring(tree) or not tree.body, f"{path.name} has no docstring"
    assert list(undocumented(tree)) == []
