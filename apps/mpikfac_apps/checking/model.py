"""Load a model to check: the module, the inputs, and the modules that the library refuses."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.problems import models

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model in float64, with inputs and coverage.

    Attributes:
        coverage: covering classes by type of module; modules that the library refuses are skipped.
        refused: modules that the library refuses to cover, with the library's message.
        inputs: shape of an example.
        tokens: examples consist of whole numbers below `tokens`; None for real numbers.
        outputs: shape of the model's output for an example: classes, and positions if any.
    """

    model: nn.Module
    coverage: mpikfac.Coverage
    refused: Mapping[str, str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tokens: int | None

    def copied(self) -> nn.Module:
        """Return a copy of the model with the same weights, in training mode."""
        return copy.deepcopy(self.model).train()

    def batch(self, examples: int, seed: int) -> Batch:
        """Return random examples and labels."""
        generator = torch.Generator().manual_seed(seed)
        given = drawn((examples, *self.inputs), self.tokens, generator)
        classes, *positions = self.outputs
        return given, torch.randint(classes, (examples, *positions), generator=generator)


def drawn(shape: tuple[int, ...], tokens: int | None, generator: torch.Generator) -> Tensor:
    """Return random inputs of a model: whole numbers below `tokens`, or real numbers."""
    if tokens is not None:
        return torch.randint(tokens, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy; random draws, for example of dropout, never change."""
    torch.manual_seed(0)
    return F.cross_entropy(model(batch[0]), batch[1])


def subject(
    name: str, inputs: tuple[int, ...] | None, classes: int, tokens: int | None = None
) -> Subject:
    """Return the network `name`, or the result of a function in a file, "models.py:build".

    Raises:
        ValueError: no network has the name, the result is no module, or the module refuses the
            input.
    """
    torch.manual_seed(0)
    file, colon, function = name.rpartition(":")
    if colon:
        model, covers = _of_file(Path(file), function)
        if inputs is None:
            raise ValueError("a model of your own needs --input, such as 3,32,32")
    elif tokens is not None:
        raise ValueError(f"{name} takes images, not --tokens {tokens}")
    else:
        inputs = inputs or models.network(name).image
        model, covers = models.build(name, classes, inputs[0]), mpikfac.KINDS
    model = model.double()
    outputs = _outputs(model, inputs, tokens)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient")
    refused = refusals(model, covers)
    coverage = mpikfac.Coverage(list(refused), covers)
    return Subject(model, coverage, refused, inputs, outputs, tokens)


def _of_file(path: Path, function: str) -> tuple[nn.Module, mpikfac.layers.Kinds]:
    """Return the function's result, and COVERS of the file (by default the library's kinds)."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    with told(f"{path}"):
        spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise ValueError(f"{path} has no function {function!r}")
    with told(f"{function}()"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}() returned {type(model).__name__}, no torch.nn.Module")
    return model, getattr(module, "COVERS", mpikfac.KINDS)


def _outputs(model: nn.Module, inputs: tuple[int, ...], tokens: int | None) -> tuple[int, ...]:
    """Return the shape of the model's output for an example."""
    given = drawn((2, *inputs), tokens, torch.Generator().manual_seed(0))
    with told(f"the model, given {list(inputs)},"), torch.no_grad():
        found = copy.deepcopy(model).train()(given)
    if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != 2:
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"the model returns {what}; cross entropy takes [batch, classes]")
    return tuple(found.shape[1:])


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn any exception of a user's code into one line.

    Raises:
        ValueError: the code raised an exception.
    """
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{what} raised {type(error).__name__}: {first}") from error


# -- modules that the library refuses ------------------------------------------------------------


def refusals(model: nn.Module, covers: mpikfac.layers.Kinds) -> dict[str, str]:
    """Return modules that cannot be covered, each with the library's message."""
    refused: dict[str, str] = {}
    while True:  # a module may be refused only if others are skipped
        try:
            mpikfac.layers.cover(model, mpikfac.Coverage(list(refused), covers))
        except mpikfac.layers.Refused as error:
            refused |= error.reasons
        else:
            return refused
