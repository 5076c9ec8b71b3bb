"""Show the names that an `__init__.py` imports for others in the API reference."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Doors(griffe.Extension):
    """Take a name imported as itself, `from mpikfac.comm.grid import Grid as Grid`, as public."""

    def on_alias_instance(
        self, *, node: ast.AST | griffe.ObjectNode, alias: griffe.Alias, **kwargs: Any
    ) -> None:
        """Mark the name as public if the import says `as` with the same name."""
        if isinstance(node, ast.ImportFrom):
            alias.public = any(name.name == name.asname == alias.name for name in node.names)
