"""Read factors and weights from the state of a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from mpikfac.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from mpikfac.comm import Comm, together
from mpikfac.errors import UserError
from mpikfac.layers import Layer
from mpikfac.numerics import unfold_triangle
from mpikfac.plan.names import FACTORS, OF_COPY, OF_KFAC, OF_MODEL, WEIGHTS

MANIFEST = "manifest.json"


def find(comm: Comm, path: Path) -> Checkpoint:
    """Return the checkpoint at the path or, if the path is a run's, its newest checkpoint.

    Collective over: comm.

    Raises:
        UserError: there is no complete checkpoint, or its manifest is damaged.
    """
    newest: Path | None = None
    with together(comm, f"looking for a checkpoint in {path}"):
        if comm.rank == 0:
            newest = _newest(path)
    return load_checkpoint(comm, comm.bcast(newest))


def _newest(path: Path) -> Path:
    if (path / MANIFEST).exists():
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir() and (newest := latest_checkpoint(root)):
            return newest
    raise UserError("no complete checkpoint found; pass the directory of a checkpoint or of a run")


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights and buffers of a checkpoint into the model.

    Raises:
        ValueError: the checkpoint has different weights for each rank.
        RuntimeError: the weights do not match the model.
    """
    if any(name.startswith(OF_COPY.partition("{")[0]) for name in checkpoint):
        raise ValueError("the run's ranks had different weights; average them, and save again")
    names = [name for name in checkpoint if name.startswith(OF_MODEL)]
    tensors = {name.removeprefix(OF_MODEL): checkpoint[name] for name in names}
    model.load_state_dict(cast(dict[str, Any], tensors))


def factors(layer: Layer, items: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return the diagonal blocks of a layer's factors A and G, each `[n, n]`.

    For a layer with groups, or for a diagonal factor, a block is `[count, n, n]`.

    Raises:
        ValueError: a factor is missing, or its running average does not contain a batch yet.
    """
    names = _factor_names(layer, items)
    for name in (name for of_side in names.values() for name in of_side):
        if not items[_weight_of(name)]:
            raise ValueError(
                f"{name!r} has not been updated with a batch yet; use a later checkpoint"
            )
    return {side: [unfold_triangle(items[n]) for n in names[side]] for side in names}


def item_names(layer: Layer, names: Collection[str]) -> list[str]:
    """Return the item names of a layer's factors, and of the weights of their running averages.

    Raises:
        ValueError: a factor is missing.
    """
    of_factors = [name for side in _factor_names(layer, names).values() for name in side]
    return of_factors + list(map(_weight_of, of_factors))


def _factor_names(layer: Layer, names: Collection[str]) -> dict[str, list[str]]:
    pattern = re.compile(re.escape(f"{OF_KFAC}{FACTORS}{layer.name}.") + "([AG])([0-9]*)")
    blocks = [match for match in map(pattern.fullmatch, names) if match]
    blocks.sort(key=lambda block: int(block[2] or 0))
    found = {side: [block[0] for block in blocks if block[1] == side] for side in "AG"}
    if missing := [side for side in layer.shape.sides if not found[side]]:
        raise ValueError(
            f"the state has no factor {layer.name}.{missing[0]}: its run took no step, or trained "
            f"the layer without Fisher factors; to leave the layer out, pass "
            f"coverage=mpikfac.Coverage(skip=[{layer.path!r}]) and skip=[{layer.path!r}]"
        )
    return found


def _weight_of(factor: str) -> str:
    return OF_KFAC + WEIGHTS + factor.removeprefix(OF_KFAC + FACTORS)
