"""Wrap trainers as torch optimizers, for programs that call `optimizer.step()`."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from mpikfac.comm import Comm, SplitComm, agree, check_connected, together
from mpikfac.errors import UserError
from mpikfac.kfac import KFAC
from mpikfac.layers import Coverage
from mpikfac.model import Descent, check_kind, settings_in
from mpikfac.numerics import PassedScale
from mpikfac.plan import AdamGrafting, Grafting, KLClip, Strategy, check_size, plain
from mpikfac.plan.names import OF_GROUPS, PARAM_GROUPS
from mpikfac.preconditioners import named_preconditioner
from mpikfac.settings import MOMENTUM, RATE, WEIGHT_DECAY, Damping, Estimator
from mpikfac.trainer import Trainer

MODEL = "model/"  # the prefix of the model's items in a trainer's state
PASSED = "grad_scale", "found_inf"
"""Attributes that a GradScaler sets on an optimizer for one step."""
PARTS = {
    **{"coverage": Coverage, "damping": Damping, "estimator": Estimator},
    **{"grafting": AdamGrafting, "clip": KLClip},
}
"""Arguments of `KFAC` whose values are objects with settings."""


class Optimizer(torch.optim.Optimizer):
    """Wrap a trainer as a torch optimizer whose `step()` is the trainer's step.

        kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.003), comm)
        optimizer = mpikfac.Optimizer(kfac)

    Learning-rate schedulers, Lightning, Accelerate and the Trainer of Hugging Face transformers
    accept it in place of a torch optimizer. Its parameter groups and state belong to the
    trainer's optimizer. `step` averages the gradients, so `DistributedDataParallel` is unnecessary,
    but harmless.

    Collective over: world.

    Args:
        trainer: a `KFAC` or a `FirstOrderTrainer`.
        max_norm: the maximum norm of the averaged gradient; see `KFAC.step`. None for no bound.

    Raises:
        ValueError: `trainer` is not a trainer, or torch.distributed connects more processes than
            MPI.
        UserError: ranks disagree on `max_norm`.

    Attributes:
        trainer: the trainer.
    """

    # This makes a GradScaler leave the unscaling to `step`, and pass the scale as an attribute.
    _step_supports_amp_scaling = True
    trainer: Trainer
    _max_norm: float | None

    def __init__(self, trainer: Trainer, *, max_norm: float | None = None) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(
                f"trainer={type(trainer).__name__} must be a KFAC or a FirstOrderTrainer"
            )
        check_connected(trainer.grid.world)
        if max_norm is not None:
            check_size("max_norm", max_norm)
        agree(trainer.grid.world, {"max_norm": plain(max_norm)})
        fields = {"trainer": trainer, "_max_norm": max_norm, "defaults": trainer.optimizer.defaults}
        super().__setstate__(fields)  # __init__ would create new parameter groups and a new state

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise TypeError: a copy would not observe the model, and would lack K-FAC's state."""
        raise TypeError(
            f"{type(self).__name__} must not be copied or pickled: the copy would lack K-FAC's "
            f"state; use state_dict()"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the trainer's optimizer."""
        return self.trainer.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of the trainer's optimizer, without K-FAC's state; see `state_dict`."""
        return self.trainer.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the trainer's optimizer; it is trained from the trainer's next step on."""
        self.trainer.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the trainer; if `closure` is given, return the loss that it returns.

        A `torch.amp.GradScaler` can call it: `scaler.scale(loss).backward()`,
        `scaler.step(optimizer)`, `scaler.update()`. All ranks skip the step if any rank's gradients
        are not finite. Each rank's scaler keeps its own scale.

        Collective over: world.

        Args:
            closure: zeroes the gradients, runs the forward and the backward pass on the rank's
                shard of the batch, and returns the loss; called once.

        Raises:
            ValueError: `scaler.unscale_` has changed the gradients, or torch.distributed connects
                more processes than MPI; see also `KFAC.step`.
            UserError: see `KFAC.step`.
        """
        check_connected(self.trainer.grid.world)
        try:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.trainer.step(self._passed_scale(), max_norm=self._max_norm)
        except BaseException:
            for name in PASSED:  # the scaler deletes both only after a step without an error
                vars(self).pop(name, None)
            raise
        return loss

    def _passed_scale(self) -> PassedScale | None:
        """Return the scale passed by a GradScaler; None if no scaler called `step`.

        Raises:
            ValueError: the gradients have been unscaled already.
        """
        if PASSED[0] not in vars(self):
            return None
        scale: Tensor | None = vars(self)[PASSED[0]]
        if scale is None:
            raise ValueError(
                "scaler.unscale_(optimizer) unscales the gradients, but not "
                "K-FAC's statistics; leave it out, and clip with max_norm"
            )
        return PassedScale(float(scale))

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's part of the trainer's state, without the model.

        Items are named as in `KFAC.state_dict`: hyperparameters and state of the optimizer,
        factors, decompositions, the number of steps. In addition, `"param_groups"` has the same
        format as in torch's optimizers, for frameworks that read it. To change a hyperparameter,
        set it in `optimizer.param_groups` after loading.

        With COMM-OPT, the default strategy, each rank's state is complete, so any number of ranks
        can load the state of rank 0. The exceptions are preconditioners whose factors come from the
        averaged gradient, such as "shampoo" and "soap", and `Refresh(staleness=1)`: with these,
        each rank stores only the factors that it decomposes, or the pending decompositions that it
        has computed, and must load its own state; other ranks reject the state of rank 0.

        Collective over: see `KFAC.state_dict`.
        """
        state = self.trainer.state_dict()
        own = {name: value for name, value in state.items() if not name.startswith(MODEL)}
        return _State(own | {PARAM_GROUPS: _numbered(self.param_groups)})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the rank's part of a `state_dict`, on all ranks or on none.

        Load the model's state first.

        Collective over: world.

        Raises:
            UserError: see `KFAC.load_state_dict`; or a hyperparameter in `"param_groups"` was
                changed after the state was saved.
        """
        present = self.trainer.state_dict()
        model = {name: value for name, value in present.items() if name.startswith(MODEL)}
        # Copied, because a state taken from this trainer shares its memory, which loading clears.
        state = copy.deepcopy(dict(state_dict)) | model
        groups = state.pop(PARAM_GROUPS, ())
        with together(self.trainer.grid.world, "loading state", untrusted=True):
            _check_groups(groups, state)
        try:
            self.trainer.load_state_dict(state)
        except UserError as error:
            if not self.trainer.missing(state.keys()):
                raise
            raise UserError(
                f"{error}; the state_dict may be that of a single rank: load each rank's own file, "
                f"or use save_checkpoint and load_checkpoint"
            ) from error


class _State(dict[str, Any]):
    """A state that raises UserError for the item "state", which only torch's optimizers have."""

    def __missing__(self, name: str) -> NoReturn:
        if name == "state":
            raise UserError(
                "K-FAC's state has no item 'state' with a tensor for each parameter, as "
                "torch.distributed.checkpoint expects; use mpikfac.save_checkpoint(comm, "
                "root, optimizer.trainer.state_dict(), step)"
            )
        raise KeyError(name)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as an `OrderedDict`, a class that `torch.load(weights_only=True)` accepts."""
        return OrderedDict, (), None, None, iter(self.items())


def _check_groups(groups: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> None:
    """Check that the parameter groups of a state agree with its hyperparameters.

    Raises:
        ValueError: a hyperparameter in a parameter group differs from the one in the state.
    """
    for name, value in settings_in(groups):
        stored = state.get(OF_GROUPS + name, value)
        if stored != value:
            raise ValueError(
                f"the state has {value!r} in param_groups, but {OF_GROUPS}{name}={stored!r}; load "
                f"the state as it was saved, and set optimizer.param_groups afterwards"
            )


def _numbered(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups as torch's `state_dict` does, with indices in place of parameters."""
    number = itertools.count()
    return [
        {key: copy.deepcopy(plain(value)) for key, value in group.items() if key != "params"}
        | {"params": [next(number) for _ in group["params"]]}
        for group in groups
    ]


class KFACOptimizer(Optimizer):
    """A torch optimizer that runs K-FAC on all ranks, with the recommended settings.

        optimizer = mpikfac.KFACOptimizer(model)
        for images, labels in loader:  # each rank: its own shard
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()  # averages gradients over ranks, preconditions them, and steps

    By default, momentum is applied before gradients are preconditioned, directions are made
    orthogonal, and each step is as long as Adam's, bounded relative to the norm of the
    weights: see `AdamGrafting`. The attribute `trainer` is the `KFAC`; if the ranks' shards have
    different sizes, call `optimizer.trainer.step(examples=n)`.

    Collective over: comm. All ranks get rank 0's model, and its layers get forward hooks.

    Args:
        model: the model.
        lr: the learning rate; a scheduler should decay it to 0.
        params: the parameters to train, or parameter groups with their own `lr`, `momentum` or
            `weight_decay`, as for any torch optimizer; all parameters of the model if None.
        momentum: Nesterov momentum of the averaged gradients. Schedulers can change it, but must
            set the same value in all groups. None: the momentum of `grafting`, or the
            preconditioner's default, which is 0.9 for most preconditioners and 0.95 for "muon".
        weight_decay: decoupled from the gradient, as in AdamW: a step multiplies weights by
            `1 - lr * weight_decay`.
        max_norm: the maximum norm of the averaged gradient; None for no bound.
        comm: the communicator of the ranks; all ranks of the job if None.
        strategy: a `Strategy`, or the name of one; every rank preconditions every layer if None.
        settings: other arguments of `KFAC`, such as `damping`, `inv_update_steps` and `coverage`.

    Raises:
        ValueError: an argument is invalid, or choices cannot be combined.
        UserError: ranks disagree on the model, the plan, settings or versions.

    Attributes:
        preconditioner: the preconditioner that a subclass fixes; None if the user chooses it.
    """

    preconditioner: ClassVar[str | None] = None

    def __init__(
        self,
        model: nn.Module,
        lr: float = RATE,
        *,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        momentum: float | None = None,
        weight_decay: float = WEIGHT_DECAY,
        max_norm: float | None = None,
        comm: Comm | SplitComm | None = None,
        strategy: Strategy | str | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model={type(model).__name__} must be a torch.nn.Module: K-FAC observes its "
                f"layers; pass parameters to train as params"
            )
        check_kind("grafting", settings.get("grafting"), Grafting)
        name = type(self).__name__
        _check_names(name, settings)
        if self.preconditioner is not None:
            if "preconditioner" in settings:
                raise ValueError(
                    f"preconditioner={settings['preconditioner']!r} is not an argument of {name}, "
                    f"whose preconditioner is {self.preconditioner!r}; leave it out, or use "
                    f"KFACOptimizer(preconditioner=...)"
                )
            settings["preconditioner"], strategy = (
                self.preconditioner,
                strategy or "sharded-optimizer",
            )
        usual = named_preconditioner(settings.get("preconditioner") or "inverse").defaults
        chosen = usual.override(settings.get("clip"), grafting=settings.pop("grafting", None))
        grafting = chosen.grafting
        if momentum is None:
            number: Any = grafting.momentum or usual.grafting.momentum or MOMENTUM
            momentum = number(0) if callable(number) else number
        trained = model.parameters() if params is None else params
        descent = Descent(trained, lr, momentum, weight_decay)
        grafting = grafting.with_momentum(momentum)  # so that error messages print its value
        if momentum:
            grafting = grafting.with_momentum(descent.momentum)
        super().__init__(
            KFAC(
                *(model, descent, comm, strategy),
                grafting=grafting,
                **settings,
            ),
            max_norm=max_norm,
        )


class DistributedMuon(KFACOptimizer):
    """Muon on all ranks: `KFACOptimizer(preconditioner="muon")` with a sharded optimizer.

        optimizer = mpikfac.DistributedMuon(model, lr=0.0075)

    It accepts the arguments of `KFACOptimizer`, except for `preconditioner`. The gradient of a
    layer is reduced to the rank that owns the layer; this rank computes the polar factor and
    updates the layer, and the new weights are sent to all ranks. A step sends no more bytes than
    averaging gradients does. `state_dict` returns only the rank's part of the state: save one file
    per rank, or use `save_checkpoint`. With `strategy="comm-opt"`, every rank computes every polar
    factor, and rank 0's state is complete. `coverage=Coverage(skip=[...])` trains the listed
    layers with Adam's step. See [Muon].

    Collective over: comm.
    """

    preconditioner = "muon"


class DistributedShampoo(KFACOptimizer):
    """Shampoo on all ranks: `KFACOptimizer(preconditioner="shampoo")` with a sharded optimizer.

        optimizer = mpikfac.DistributedShampoo(model, lr=0.0075)

    It accepts the arguments of `KFACOptimizer`, except for `preconditioner`. Strategy and state are
    as in `DistributedMuon`; the owner of a layer also keeps its factors, and computes their inverse
    roots every `inv_update_steps` steps [Gupta et al. 2018].

    Collective over: comm.
    """

    preconditioner = "shampoo"


class DistributedNorMuon(DistributedMuon):
    """NorMuon on all ranks: `DistributedMuon` with `preconditioner="normuon"` [NorMuon]."""

    preconditioner = "normuon"


class DistributedSOAP(DistributedShampoo):
    """SOAP on all ranks: `DistributedShampoo` with `preconditioner="soap"` [SOAP]."""

    preconditioner = "soap"


def _check_names(name: str, settings: Mapping[str, Any]) -> None:
    """Check that `KFAC` accepts the settings of a `KFACOptimizer`, or of its subclass `name`.

    Raises:
        TypeError: a setting is not an argument of `KFAC`.
    """
    further = inspect.signature(KFAC).parameters.values()
    taken = [argument.name for argument in further if argument.kind is argument.KEYWORD_ONLY]
    own = [name for name in inspect.signature(KFACOptimizer).parameters if name != "settings"]
    for wrong in settings.keys() - set(taken):
        of_parts = [
            f"{argument}=mpikfac.{kind.__name__}({wrong}=...)"
            for argument, kind in PARTS.items()
            if wrong in {field.name for field in fields(kind)}
        ]
        if near := of_parts or get_close_matches(wrong, [*own, *taken], n=1):
            raise TypeError(f"{name} has no argument {wrong!r}; did you mean {' or '.join(near)}?")
        raise TypeError(f"{name} has no argument {wrong!r}; see help(mpikfac.KFAC)")
