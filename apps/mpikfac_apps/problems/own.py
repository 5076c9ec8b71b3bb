"""Make a user's model from a function in a file, "models.py:build", and inputs for the model."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import mpikfac


def is_own(name: str) -> bool:
    """Return whether the name of a model is FILE.py:FUNCTION."""
    return ":" in name


def check_file(name: str) -> None:
    """Return if the file of FILE.py:FUNCTION exists.

    Raises:
        ValueError: the file does not exist.
    """
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise ValueError(f"{path} is no file")


def function_of(name: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return FUNCTION of FILE.py:FUNCTION, and the module that the file makes.

    Raises:
        ValueError: the file or the function does not exist, or the file raises.
    """
    check_file(name)
    file, _, function = name.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    with told(f"{path}"):
        spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{path} has no function {function!r}")
    return found, module


def made(name: str) -> tuple[nn.Module, mpikfac.layers.Kinds]:
    """Return the result of FILE.py:FUNCTION, and COVERS of the file (or the library's kinds).

    Raises:
        ValueError: the file or the function does not exist, raises, or returns no module.
    """
    build, module = function_of(name)
    function = name.rpartition(":")[2]
    with told(f"{function}()"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}() returned {type(model).__name__}, no torch.nn.Module")
    return model, getattr(module, "COVERS", mpikfac.KINDS)


def drawn(shape: tuple[int, ...], tokens: int | None, generator: torch.Generator) -> Tensor:
    """Return random inputs of a model: whole numbers below `tokens`, or numbers in float64."""
    if tokens is not None:
        return torch.randint(tokens, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def outputs_of(model: nn.Module, inputs: Tensor) -> tuple[int, ...]:
    """Return the shape of the model's output for an example: classes, and positions if any.

    Raises:
        ValueError: the model raises, or returns something that cross entropy does not take.
    """
    with told(f"the model, given {list(inputs.shape[1:])},"), torch.no_grad():
        found = copy.deepcopy(model).train()(inputs)
    if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != len(inputs):
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
