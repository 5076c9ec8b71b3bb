"""Estimate the size of a checkpoint, and describe what a new preconditioner takes from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import mpikfac
from mpikfac_apps.options.options import Options

MOMENTA = "kfac/momentum/"  # the prefix of the names of gradient momenta
KINDS = {
    "factors": ("kfac/factors/", "kfac/vectors/", "kfac/gradient-factors/"),
    "decompositions": ("kfac/bases/",),
    "lengths": ("kfac/graft/",),
    "lengths in eigenbases": ("kfac/rotated/",),
    "lengths of rows": ("kfac/rows/",),
    "momenta": (MOMENTA,),
}
"""Descriptions of preconditioners' states, and the prefixes of the names of their items."""


def megabytes(plan: mpikfac.plan.Plan, tensors_per_weight: int) -> float:
    """Estimate the size of a checkpoint in MB: weights, momentum, packed factors, bases, scales.

    Args:
        tensors_per_weight: the number of values stored per weight: the weight, its momentum, and
            averages, for example.
    """
    factors = plan.factors.values()
    averages = sum(math.prod(factor.triangle) for factor in factors)
    bases = sum(math.prod(factor.part(2)) + math.prod(factor.part(1)) for factor in factors)
    of_rank = plan.of(0)
    scales = mpikfac.plan.scales.layout(of_rank).size
    weights = tensors_per_weight * of_rank.layouts.gradients.size + scales
    curvature = plan.factor_itemsize * averages + plan.basis_itemsize * bases
    return (plan.itemsize * weights + curvature) / 1e6


def carried(
    comm: mpikfac.comm.Comm, trainer: mpikfac.KFAC, items: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Describe which states are continued, restarted or dropped if the preconditioner changes.

    Collective over: comm.

    Args:
        items: the items of the checkpoint, which another preconditioner wrote.
    """
    shares = comm.allgather([*trainer.state_dict()])
    now, before = _kinds(set().union(*shares)), _kinds(items)
    forms = [layer.preconditioner for layer in trainer.plan.of(comm.rank).layers]
    kept = {"factors"} if trainer.plan.factors else set()
    kept |= {"decompositions"} if any(form.blocks for form in forms) else set()
    both = now & before
    parts = both, (now | kept) - both, before - now - kept
    going, anew, left = (", ".join(sorted(part)) or "nothing" for part in parts)
    return going, anew, left


def _kinds(names: Collection[str]) -> set[str]:
    """Return the descriptions of the K-FAC states to which the items `names` belong."""
    return {
        word for word, prefixes in KINDS.items() if any(name.startswith(prefixes) for name in names)
    }


def check_momentum(options: Options, items: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the kind of momentum that the options select.

    Momentum is applied either to gradients or to directions. `KFAC.load_state_dict` rejects the
    same checkpoints, but its error messages do not name the programs' options.

    Args:
        items: the items of a checkpoint.

    Raises:
        ValueError: the momentum would be applied twice, or never.
    """
    now = options.momentum if options.momentum_of_gradients else 0.0
    if not now and any(name.startswith(MOMENTA) for name in items):
        raise ValueError(
            f"it contains gradient momentum, which optimizer={options.optimizer} cannot continue; "
            f"use optimizer=kfac, kfac.momentum_of=gradients and momentum > 0, as before, or start "
            f"a new run with resume=never and a different run_dir"
        )
    for name in items:
        of_group = name.startswith("optimizer/groups/") and name.endswith("/momentum")
        if now and of_group and items[name]:
            raise ValueError(
                f"it contains momentum of directions (momentum={items[name]}), but no momentum of "
                f"gradients; continue with kfac.momentum_of=directions"
            )
