"""Create third-party networks, with a function in a file ("models.py:build") or with timm."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import mpikfac

USUAL = {"classes": 10, "channels": 3}
"""Values for required arguments of a user's function that no option sets."""


# -- functions in files ----------------------------------------------------------------------------


def built(name: str, **numbers: int | None) -> nn.Module:
    """Return the result of FILE.py:FUNCTION.

    Args:
        numbers: values for the parameters `classes` and `channels`, if the function has them; None
            for the parameter's default or, if it has none, the value in `USUAL`.

    Raises:
        ValueError: the file or the function does not exist or raises an error, or the function does
            not return a module.
    """
    build, function = function_of(name), name.rpartition(":")[2]
    parameters = inspect.signature(build).parameters
    required = {
        key for key, parameter in parameters.items() if parameter.default is parameter.empty
    }
    arguments = {
        key: USUAL[key] if numbers[key] is None else numbers[key]
        for key in takes(name)
        if key in required or numbers[key] is not None
    }
    with one_line_errors(f"{function}()"):
        model = build(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}() returned {type(model).__name__}, not a torch.nn.Module")
    tensors = chain(model.named_parameters(), model.named_buffers())
    if lazy := [key for key, tensor in tensors if is_lazy(tensor)]:
        raise ValueError(f"{lazy[0]} has no shape yet; call the model once in {function}()")
    return model


def result(name: str) -> Any:
    """Return the result of FILE.py:FUNCTION, called without arguments.

    Raises:
        ValueError: the file or the function does not exist, or raises an error.
    """
    build = function_of(name)
    with one_line_errors(f"{name.rpartition(':')[2]}()"):
        return build()


def takes(name: str) -> Collection[str]:
    """Return which of the arguments `classes` and `channels` FILE.py:FUNCTION takes.

    Raises:
        ValueError: the file or the function does not exist, or the file raises an error.
    """
    return USUAL.keys() & inspect.signature(function_of(name)).parameters.keys()


def covers(name: str) -> mpikfac.layers.Kinds:
    """Return `COVERS` of FILE.py, or the library's `KINDS` if the file does not define it.

    Raises:
        ValueError: the file does not exist, or raises an error.
    """
    return getattr(_content(name), "COVERS", mpikfac.KINDS)


def function_of(name: str) -> Callable[..., Any]:
    """Return the function that FILE.py:FUNCTION names.

    Raises:
        ValueError: the file or the function does not exist, or the file raises an error.
    """
    path, _, function = name.rpartition(":")
    build = getattr(_content(name), function, None)
    if not callable(build):
        raise ValueError(f"{path} has no function {function!r}")
    return build


def class_of(name: str) -> type:
    """Return the class that FILE.py:CLASS names.

    Raises:
        ValueError: the file or the class does not exist, or the file raises an error.
    """
    path, _, kind = name.rpartition(":")
    found = getattr(_content(name), kind, None)
    if not isinstance(found, type):
        raise ValueError(f"{path} has no class {kind!r}")
    return found


def check_file(name: str) -> Path:
    """Return the file of FILE.py:FUNCTION.

    Raises:
        ValueError: the file does not exist.
    """
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    return path


def _content(name: str) -> ModuleType:
    path = check_file(name)
    return _executed(path.resolve(), path.stat().st_mtime_ns)


@cache  # a second execution would create new classes, which are missing in the first COVERS
def _executed(path: Path, changed: int) -> ModuleType:  # noqa: ARG001 (a key of the cache)
    # Annotations are looked up in `sys.modules` under this name, so it must be unique.
    name = str(path.with_suffix("")) if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    with one_line_errors(f"{path}"):
        spec.loader.exec_module(module)
    return module


# -- timm ------------------------------------------------------------------------------------------


def of_timm(name: str, classes: int, channels: int) -> nn.Module:
    """Return a newly initialised timm network.

    Raises:
        ValueError: timm cannot create the network.
    """
    with one_line_errors(f"timm.create_model({name!r})"):
        return timm().create_model(name, num_classes=classes, in_chans=channels)


def usual_of_timm(name: str) -> tuple[tuple[int, int, int], int, bool]:
    """Return a timm network's default image shape and classes, and whether the size is fixed.

    Raises:
        ValueError: timm is not installed, or has no network with this name.
    """
    package, (network, _, trained) = timm(), name.partition(".")
    if trained or not package.is_model(name):
        close = get_close_matches(name, package.list_models(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        if trained and package.is_model(network):
            hint = (
                f" without weights: {trained} names trained weights, which are not downloaded; "
                f"save the state_dict of timm.create_model({name!r}, pretrained=True), and pass "
                f"--model timm:{network} --weights FILE"
            )
        raise ValueError(f"model=timm:{name} is not a timm network{hint}")
    usual = package.models.get_pretrained_cfg(name)
    if usual is None:
        return (3, 224, 224), 1000, False
    return tuple(usual.input_size), usual.num_classes, usual.fixed_input_size


def timm() -> Any:
    """Return the package timm.

    Raises:
        ValueError: the package, or one that timm requires, is not installed; or torchvision is
            from a different build than torch.
    """
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # such as torchvision for CUDA with torch for CPUs
        raise ValueError(
            f"model=timm:NAME needs the packages timm and torchvision: {summary(error)}; run pip "
            f"install timm {torchvision_of(str(torch.__version__))}"
        ) from error


def torchvision_of(version: str) -> str:
    """Return pip's arguments for the torchvision that matches a version and build of torch.

    Since 2.9, torch 2.N.M requires torchvision 0.(N + 15).M. A build such as "cu128" has its own
    package index.
    """
    public, _, build = version.partition("+")
    numbers = re.fullmatch(r"2\.(\d+)\.(\d+)", public)
    package = f"torchvision==0.{int(numbers[1]) + 15}.{numbers[2]}" if numbers else "torchvision"
    if re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build):
        return f"{package} --extra-index-url https://download.pytorch.org/whl/{build}"
    return f"{package}, in the same build as torch {version}"


# -- inputs and outputs ----------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], tokens: int | None, generator: torch.Generator) -> Tensor:
    """Return random model inputs: integers below `tokens` or, if it is None, float64 values."""
    if tokens is not None:
        return torch.randint(tokens, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the model's outputs, `[batch, classes]` or `[batch, classes, *positions]`.

    Raises:
        ValueError: the model raises an error, or returns something that cross entropy cannot use.
    """
    with one_line_errors(f"the model, given {list(inputs.shape[1:])},"), torch.no_grad():
        outputs = copy.deepcopy(model).train()(inputs)
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != len(inputs):
        what = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"the model returns {what}; cross entropy needs [batch, classes]")
    return outputs


def named_probabilities(outputs: Tensor) -> str:
    """Return "probabilities" or "log-probabilities" if `outputs` are either of them, else "".

    Args:
        outputs: `[batch, classes]`.
    """
    for name, shares in (("probabilities", outputs), ("log-probabilities", outputs.exp())):
        sums = shares.float().sum(1)
        if bool((shares >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=0.01):
            return name
    return ""


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Convert any exception raised in the with statement's body to a one-line ValueError.

    Args:
        what: what the body does, such as the call of a user's function, for the error message.

    Raises:
        ValueError: the body raised an exception.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {summary(error)}") from error


def summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, if there is one."""
    first = str(error).strip().partition("\n")[0]
    return ": ".join(filter(None, [type(error).__name__, first]))
