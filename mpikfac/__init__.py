"""mpikfac: training CNNs with distributed K-FAC under MPI.

Names are imported on first use, so that planning (`mpikfac.make_plan`) starts no MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "errors": ("UserError", "ending"),
    "strategy": ("Strategy", "divisors"),
    "catalogue": ("NAMED", "Named", "named"),
    "layout": ("lay_out",),
    "messages": ("Codec", "Message", "message"),
    "shapes": ("FactorShape", "LayerShape", "forward_only", "usual_rule"),
    "plan": ("Plan", "make_plan"),
    "machine": (*("Level", "Machine", "Network", "Sample", "load_machine", "published_machines"),),
    "costmodel": ("level_of",),
    "simulator": ("Job", "Prediction", "Step", "cheapest", "simulate"),
    "tuning": ("choose", "tuned"),
    "kron": ("unfold_triangle",),
    "decompose": ("damped_inverse", "eigenbasis", "tikhonov_share"),
    "adaptation": ("LevenbergMarquardt",),
    "trace": ("COMMUNICATION", "Event", "Trace"),
    "comm": (
        *("Grid", "agree", "check_survivable", "clock_offset", "device", "leaving"),
        *("lost_a_rank", "split", "survivors", "together", "world"),
    ),
    "curvature": ("serve",),
    "layers": ("KINDS", "NORMS", "Layer", "cover", "covered_shapes"),
    "data_parallel": ("DataParallel",),
    "kfac": ("KFAC",),
    "manifest": ("Checkpoint", "latest_checkpoint", "read_checkpoint"),
    "starts": ("note_end", "note_start"),
    "checkpoint": ("CheckpointWriter", "find_checkpoint", "load_checkpoint", "save_checkpoint"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
_MODULES = ("schedule", "timeline")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mpikfac.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'mpikfac' has no attribute {name!r}")
    return getattr(import_module(f"mpikfac.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
