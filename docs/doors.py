"""Include the names that an `__init__.py` re-exports in the API reference."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Doors(griffe.Extension):
    """Mark re-exported names as public, as in `from .grid import Grid as Grid`."""

    def on_alias_instance(
        self, *, node: ast.AST | griffe.ObjectNode, alias: griffe.Alias, **kwargs: Any
    ) -> None:
        """Mark a name as public if it is imported under its own name with `as`."""
        if isinstance(node, ast.ImportFrom):
            alias.public = any(name.name == name.asname == alias.name for name in node.names)
