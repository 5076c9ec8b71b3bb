"""Compare a model's parameters with those that a trainer knows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn

log = logging.getLogger("mpikfac")


class Trainer(Protocol):
    """An object with hooks on a model."""

    def detach(self) -> None:
        """Remove the hooks."""


TRAINERS: WeakKeyDictionary[nn.Module, ReferenceType[Trainer]] = WeakKeyDictionary()


def take_model(model: nn.Module, trainer: Trainer) -> None:
    """Attach `trainer` to the model, and remove the hooks of its previous trainer."""
    older = TRAINERS.get(model)
    if older is not None and (present := older()) is not None and present is not trainer:
        present.detach()
        log.warning("the model's previous %s has been detached", type(present).__name__)
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for other, reference in list(TRAINERS.items()):
        alive = None if other is model else reference()
        if alive is not None and not own.isdisjoint(map(id, other.parameters())):
            log.warning(
                "the model shares parameters with another model that has a %s: both "
                "trainers update them; freeze them in one of the models, or call detach() on one "
                "trainer",
                type(alive).__name__,
            )
    TRAINERS[model] = ref(trainer)


def leave_model(model: nn.Module, trainer: Trainer) -> None:
    """Record that `trainer` no longer trains the model."""
    if trainer_of(model) is trainer:
        del TRAINERS[model]


def trainer_of(model: nn.Module) -> Trainer | None:
    """Return the trainer of the model; None if there is none."""
    reference = TRAINERS.get(model)
    return None if reference is None else reference()


class Hook(partial[None]):
    """A trainer's hook on a model; it does nothing in a copied or saved model."""

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)

    @property
    def __name__(self) -> str:
        """The name that `torch.jit.script` reads before it compiles a hook.

        Raises:
            AttributeError: the model still has hooks.
        """
        raise AttributeError(
            "the model has hooks of mpikfac, which torch.jit.script cannot compile: call the "
            "trainer's close() before torch.jit.script(model), or script a new model that has "
            "loaded model.state_dict()"
        )


def _nothing(*_: Any) -> None:
    """Do nothing, in place of a hook."""


class Trained:
    """The trained parameters of a model, as the trainer knows them.

    Args:
        parameters: the parameters whose gradients the trainer averages, of one dtype on one device.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._model = model
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._kinds = {(p.dtype, p.device) for p in self._parameters.values()}

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The parameters, by their names in the model."""
        return {self._names[key]: parameter for key, parameter in self._parameters.items()}

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    def changed(self) -> bool:
        """Return whether the set of the model's parameters that require a gradient has changed.

        A renamed parameter counts as a different one, because pruning and parametrisations rename
        the weight, and the module then uses another tensor in its place.

        Raises:
            ValueError: a parameter was converted to another dtype, or moved to another device.
        """
        present = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        same = len(present) == len(self._parameters) and all(
            id(p) in self._parameters and self._names[id(p)] == name for name, p in present.items()
        )
        if same:
            self._check_kinds(present.values())
        return not same

    def leave_changed(self) -> None:
        """Set the gradients of newly trained, newly frozen and replaced parameters to None."""
        present = list(self._model.parameters())
        trained = {id(parameter) for parameter in present if parameter.requires_grad}
        for parameter in [*present, *self._parameters.values()]:
            if (id(parameter) in trained) != (id(parameter) in self._parameters):
                parameter.grad = None

    def _check_kinds(self, present: Iterable[Tensor]) -> None:
        for parameter in present:
            kind = parameter.dtype, parameter.device
            if kind not in self._kinds:
                before = " or ".join(f"{dtype} on {device}" for dtype, device in self._kinds)
                raise ValueError(
                    f"a parameter is {kind[0]} on {kind[1]}, but was {before} when the trainer was "
                    f"created; convert or move the model before creating the trainer"
                )
