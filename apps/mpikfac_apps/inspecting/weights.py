"""Read weights from plain files, and load them into a network whose last module can differ."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mpikfac import files
from mpikfac_apps.inspecting.options import check_package

LARGER = 2**30
"""The bytes by which a file can exceed the network in float64: its last module can be larger."""


def read(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without executing code from it.

    Args:
        path: a safetensors file, or a state_dict written by `torch.save`.
        model: the network that the weights are for, which limits the size of the file.

    Raises:
        ValueError: the file cannot be read, is too large, or contains anything but a state_dict.
    """
    check_package(path)
    limit = LARGER + 8 * sum(tensor.numel() for tensor in model.state_dict().values())
    try:
        content = files.read_bytes(path, limit, links=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {files.why(error)}") from error
    try:
        tensors = _loaded(path, content)
    except Exception as error:  # reading a damaged file can raise any exception
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is not a file of weights: {reason}") from error
    if not isinstance(tensors, Mapping) or not all(map(torch.is_tensor, tensors.values())):
        raise ValueError(f"{path} must contain only a state_dict, which maps names to tensors")
    for name, tensor in tensors.items():
        # Strided tensors can reuse bytes, so a small file can describe a tensor of any size.
        if tensor.numel() * tensor.element_size() > len(content):
            raise ValueError(f"{path} is not a file of weights: {name} is larger than the file")
    return dict(tensors)


def _loaded(path: Path, content: bytes) -> object:
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        return load(content)
    if zipfile.is_zipfile(io.BytesIO(content)):  # torch does not compress
        unpacked = sum(record.file_size for record in zipfile.ZipFile(io.BytesIO(content)).filelist)
        if unpacked > len(content):
            raise ValueError(
                f"its records must not be compressed: {len(content):,} bytes contain {unpacked:,}"
            )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load weights into a network; return the names of its tensors that keep their values.

    Only tensors of the last module with parameters, the classifier, may keep their values, if
    `tensors` lacks them or has them in a different shape. Other dtypes are converted.

    Raises:
        ValueError: tensors of other modules are missing, unknown or of a different shape; the
            network is unchanged.
    """
    state, last = model.state_dict(), last_module(model)
    names = dict.fromkeys([*state, *tensors])
    differing = [name for name in names if form(tensors, name) != form(state, name)]
    if wrong := [name for name in differing if name.rpartition(".")[0] != last]:
        name, suffix = wrong[0], f", and {len(wrong) - 1} more" if wrong[1:] else ""
        raise ValueError(
            f"{name} has {form(tensors, name)} in the file and {form(state, name)} in the "
            f"network{suffix}; only tensors of the last module, {last}, can differ"
        )
    fitting = {name: tensors[name] for name in state if name not in differing}
    model.load_state_dict(fitting, strict=False)
    return [name for name in state if name in differing]


def last_module(model: nn.Module) -> str:
    """Return the name of the last module with parameters; "" if it is the network itself."""
    names = [name for name, _ in model.named_parameters()]
    return names[-1].rpartition(".")[0] if names else ""


def form(tensors: Mapping[str, Tensor], name: str) -> str:
    """Return a description of the shape of the tensor `name`, or of its absence."""
    return f"shape {list(tensors[name].shape)}" if name in tensors else "no such tensor"
