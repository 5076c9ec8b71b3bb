"""Reject models of which a rank holds only shards."""

from __future__ import annotations

from torch import nn

FSDP = "FullyShardedDataParallel"


def check_unsharded(model: nn.Module) -> None:
    """Check that every rank holds whole parameters.

    Raises:
        ValueError: a parameter is a shard of `fully_shard`, of FullyShardedDataParallel, of one of
            torch's tensor-parallel plans, or of DeepSpeed's ZeRO-3.
    """
    for name, module in model.named_modules():
        # Compare names, because importing the class takes longer than importing this whole library.
        if any(kind.__name__ == FSDP for kind in type(module).__mro__):
            raise _refusal(f"{name or 'the model'} is wrapped in {FSDP}")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise _refusal(f"{name} is a DTensor, as fully_shard creates")
        if hasattr(parameter, "ds_id"):
            raise _refusal(f"{name} is partitioned by DeepSpeed's ZeRO-3")


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what}; use the plain model, which `mpirun` or `mpikfac launch` replicates: K-FAC needs "
        f"whole weights on every rank"
    )
