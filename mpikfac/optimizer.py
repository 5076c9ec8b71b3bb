"""A trainer in the form of a torch optimizer, for programs that call `optimizer.step()`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from mpikfac.comm import world
from mpikfac.trainer import Trainer

MODEL = "model/"  # names of items of the model in a trainer's state


class Optimizer(torch.optim.Optimizer):
    """A trainer in the form of a torch optimizer: `step()` is the trainer's step.

        kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.003), comm)
        optimizer = mpikfac.Optimizer(kfac)

    Learning-rate schedulers, Lightning, Accelerate and the Trainer of transformers take the object
    in the place of a torch optimizer. Parameter groups and state are those of the trainer's
    optimizer. Gradients are averaged in `step`: `DistributedDataParallel` is not needed, and does
    no harm.

    Collective over: none.

    Args:
        trainer: the trainer, with `step(max_norm=...)`.
        max_norm: the largest norm of the averaged gradient; see `KFAC.step`. None for no bound.

    Raises:
        ValueError: another trainer; torch.distributed joins more processes than MPI.

    Attributes:
        trainer: the trainer.
    """

    # A GradScaler then leaves gradients to `step`, and `step` refuses the scaler by name.
    _step_supports_amp_scaling = True
    trainer: Trainer
    _max_norm: float | None

    def __init__(self, trainer: Trainer, *, max_norm: float | None = None) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(f"trainer={type(trainer).__name__} must be a KFAC or a DataParallel")
        _check_processes()
        fields = {"trainer": trainer, "_max_norm": max_norm, "defaults": trainer.optimizer.defaults}
        super().__setstate__(fields)  # __init__ would make parameter groups and a state anew

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the trainer's optimizer."""
        return self.trainer.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of the trainer's optimizer, without K-FAC's; see `state_dict`."""
        return self.trainer.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the trainer's optimizer; the trainer's next step takes up the change."""
        self.trainer.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the trainer's step; return the loss if there is a closure.

        Collective over: world.

        Args:
            closure: zeroes the gradients, runs forward and backward pass of the rank's share of the
                batch, and returns the loss; called once.

        Raises:
            ValueError: a GradScaler calls; torch.distributed joins more processes than MPI; see
                also `KFAC.step`.
            UserError: see `KFAC.step`.
        """
        if hasattr(self, "found_inf"):  # set by a GradScaler
            for name in ("found_inf", "grad_scale"):
                delattr(self, name)  # the scaler deletes both only after a step without an error
            raise ValueError(
                "a GradScaler decides on each rank alone whether to step; call "
                "optimizer.trainer.step(scaler), or train in bfloat16 without a scaler"
            )
        _check_processes()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.trainer.step(max_norm=self._max_norm)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's share of the trainer's state, without the model.

        Items have the names of `KFAC.state_dict`: numbers and state of the optimizer, factors,
        decompositions, number of steps. With COMM-OPT, the default strategy, the share of each rank
        is the whole, so the state of rank 0 loads on all ranks, and on any number of ranks.

        Collective over: see `KFAC.state_dict`.
        """
        state = self.trainer.state_dict()
        return {name: value for name, value in state.items() if not name.startswith(MODEL)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the rank's part of a `state_dict`, after the model's state; on all ranks, or none.

        Collective over: world.

        Raises:
            UserError: see `KFAC.load_state_dict`.
        """
        present = self.trainer.state_dict()
        model = {name: value for name, value in present.items() if name.startswith(MODEL)}
        # Copied, as a state of this trainer shares its memory, which loading clears.
        self.trainer.load_state_dict(copy.deepcopy(dict(state_dict)) | model)


def _check_processes() -> None:
    """Return if MPI joins the processes that torch.distributed joins.

    Raises:
        ValueError: a launcher of torch started the processes, so that K-FAC averages nothing.
    """
    if distributed.is_available() and distributed.is_initialized():
        joined, ranks = distributed.get_world_size(), world().size
        if joined > ranks:
            raise ValueError(
                f"torch.distributed joins {joined} processes, and MPI joins {ranks}: start the "
                f"program by mpirun, as K-FAC averages statistics over the ranks of MPI"
            )
