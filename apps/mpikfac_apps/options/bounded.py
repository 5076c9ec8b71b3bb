"""Read YAML of bounded depth and size, because a short text with aliases can become huge."""

from __future__ import annotations

import reprlib
from typing import Any, NoReturn

import yaml

from mpikfac import files

MOST = 10_000
"""The maximum number of values and keys in a document, with aliases expanded."""
TAG = "tag:yaml.org,2002:"
PLAIN = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


class Bounded(yaml.SafeLoader):
    """Load plain data; reject documents with too many levels or values, or recursive anchors."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = self._nodes = 0
        self._complete: dict[yaml.Node, tuple[int, int]] = {}  # values and levels of each node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, including its children, after checking its depth and size."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        alias = self.check_event(yaml.AliasEvent)
        self._level += 1
        self._nodes += 1
        self._check(self._nodes, self._level, mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if alias and node not in self._complete:
            self._refuse("an alias is inside its own anchor", mark)
        if node is not None and node.tag not in PLAIN:
            self._refuse(f"{node.tag} is not plain data", mark)
        if node is not None and not alias:
            inner = [self._complete[part] for part in _inside(node)]
            values = 1 + sum(values for values, _ in inner)
            levels = 1 + max((levels for _, levels in inner), default=0)
            self._check(values, levels, mark)
            self._complete[node] = values, levels
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the node's value."""
        try:
            value = super().construct_object(node, deep)
        except (LookupError, TypeError, ValueError):  # `!!int x`, or a number with 5,000 digits
            value, kind = reprlib.repr(node.value), node.tag.removeprefix(TAG)
            self._refuse(f"{value} is not a value of type {kind}", node.start_mark)
        if isinstance(value, int) and abs(value) > files.HUGE:
            reason = f"{reprlib.repr(value)} must be within ±{files.HUGE:,}"
            self._refuse(reason, node.start_mark)
        return value

    def _check(self, values: int, levels: int, mark: yaml.Mark) -> None:
        if values > MOST:
            self._refuse(f"it has more than {MOST:,} values, with aliases expanded", mark)
        if levels > files.DEEP:
            self._refuse(f"it has more than {files.DEEP} levels", mark)

    def _refuse(self, reason: str, mark: yaml.Mark) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=reason, problem_mark=mark)


# A date such as 2026-01-01 is loaded as a string, because it can be a name.
Bounded.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
