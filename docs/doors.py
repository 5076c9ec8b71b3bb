"""Show the names that an `__init__.py` re-exports in the API reference."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Doors(griffe.Extension):
    """Treat names that are imported as themselves (`from x import Grid as Grid`) as public."""

    def on_alias_instance(
        self, *, node: ast.AST | griffe.ObjectNode, alias: griffe.Alias, **kwargs: Any
    ) -> None:
        """Mark the name as public if the import repeats it after `as`."""
        if isinstance(node, ast.ImportFrom):
            alias.public = any(name.name == name.asname == alias.name for name in node.names)
