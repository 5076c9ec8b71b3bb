"""Store the rows of sharded tensors as items of a state, and load them on any number of ranks.

The name of a sharded tensor's item contains its rows: "model/0.weight[0:2]". A rank can load its
rows from a state with whole tensors, or from one saved on any number of ranks, if this state
contains the items of all those ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.numerics import is_sharded, local
from mpikfac.plan.names import OF_MODEL, OF_OPTIMIZER_STATE

ROWS = re.compile(r"(.+)\[(\d+):(\d+)\]")


def rows_of(tensor: Any) -> tuple[int, int]:
    """Return the first and last (exclusive) row of a sharded tensor that this rank holds."""
    mesh = tensor.device_mesh
    of_shards = mesh.ndim - 1  # before it, there can be a dimension of replicas
    each = -(-len(tensor) // mesh.size(of_shards))
    start = min(each * mesh.get_local_rank(of_shards), len(tensor))
    return start, start + len(local(tensor))


def in_rows(name: str, tensor: Any) -> str:
    """Return the name of a tensor's item, with this rank's rows if the tensor is sharded."""
    return "{}[{}:{}]".format(name, *rows_of(tensor)) if is_sharded(tensor) else name


def without_rows(name: str) -> str:
    """Return the name of an item without the rows, if it contains any."""
    found = ROWS.fullmatch(name)
    return found[1] if found else name


def whole_names(names: Iterable[str], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of all tensors that are stored completely, with all their rows.

    Args:
        names: the names of the items in the state.
        tensors: the model's tensors, by name.
    """
    found, rows = set[str](), dict[str, set[int]]()
    for name in names:
        if part := ROWS.fullmatch(name):
            rows.setdefault(part[1], set()).update(range(int(part[2]), int(part[3])))
        else:
            found.add(name)
    for name, own in rows.items():
        tensor = tensors.get(_tensor_of(name))
        if tensor is None or len(own) == len(tensor):
            found.add(name)
    return found


def _tensor_of(name: str) -> str:
    """Return the model's name for the tensor that a state's item belongs to."""
    if name.startswith(OF_OPTIMIZER_STATE):
        return name.removeprefix(OF_OPTIMIZER_STATE).rpartition("/")[0]
    return name.removeprefix(OF_MODEL)


def stored(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return an item with this rank's rows of a tensor, as a view; no item if there are no rows."""
    rows = local(tensor)
    return [] if is_sharded(tensor) and not rows.numel() else [(in_rows(name, tensor), rows)]


@torch.no_grad()
def load_rows(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows from a state's `values` to the sharded tensors of a model."""
    for name, tensor in model.state_dict().items():
        if is_sharded(tensor) and (item := in_rows(name, tensor)) in values:
            local(tensor).copy_(values[item])


class Joined(Mapping[str, Any]):
    """A state whose tensors can be read as a whole or by rows, however they are stored.

    Iteration yields the names without rows.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._parts: dict[str, list[tuple[int, int, str]]] = {}
        for name in state:
            if found := ROWS.fullmatch(name):
                part = int(found[2]), int(found[3]), name
                self._parts.setdefault(found[1], []).append(part)
        for parts in self._parts.values():
            parts.sort()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(map(without_rows, self._state)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        whole = without_rows(name) if isinstance(name, str) else ""
        return whole in self._state or whole in self._parts

    def __getitem__(self, name: str) -> Any:
        """Return an item, or as many of its rows as the state contains."""
        if name in self._state:
            return self._state[name]
        if name not in self:
            raise KeyError(name)
        found = ROWS.fullmatch(name)
        whole = found[1] if found else name
        parts = self._parts.get(whole, [])
        first, last = map(int, found.groups()[1:]) if found else (0, max(p[1] for p in parts))
        if whole in self._state:
            return self._state[whole][first:last]
        covered = [part for part in parts if part[0] < last and first < part[1]] or parts[:1]
        rows = (
            self._state[item][max(0, first - at) : max(0, last - at)] for at, _, item in covered
        )
        return torch.cat([*rows])
