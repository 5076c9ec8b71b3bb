"""The layering of the house, read from the syntax trees: who may import what, and docstrings."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "mpikfac").rglob("*.py"))
PROGRAMS = sorted((ROOT / "apps").rglob("*.py"))
ONLY_IMPORTER = {"mpi4py": "comm.py", "h5py": "checkpoint.py", "mpikfac_apps": "__main__.py"}
INHERITED = ("forward", "emit", "find_class")  # what they do is said where they are first defined
STANDARD_LIBRARY_ONLY = ("plan.py", "schedule.py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


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
    for module in imported(parse(path)):
        package = module.partition(".")[0]
        assert path.name == ONLY_IMPORTER.get(package, path.name), f"{path.name} imports {module}"
        if path.name in STANDARD_LIBRARY_ONLY:
            allowed = package in sys.stdlib_module_names
            assert allowed, f"{path.name} imports {module}; it is for the standard library only"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_use_the_public_library(path):
    """Programs see what users see: the names that `mpikfac` itself exports, and no MPI or HDF5."""
    for module in imported(parse(path)):
        assert not module.startswith("mpikfac."), f"{path.name} imports {module}"
        assert module.partition(".")[0] not in ("mpi4py", "h5py"), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", LIBRARY + PROGRAMS, ids=lambda path: path.name)
def test_public_functions_have_docstrings(path):
    tree = parse(path)
    assert ast.get_docstring(tree) or not tree.body, f"{path.name} has no docstring"
    assert list(undocumented(tree)) == []
