"""Options of programs for checkpoints and images; printing the help does not import torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mpikfac_apps.cli import path_of, picture
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, positional, read_by


def weights_file(text: str) -> Path:
    """Return `text` as the path of a new file, after checking its suffix."""
    path = new_file(text, ".pt", ".safetensors")
    check_package(path)
    return path


def check_package(path: Path) -> None:
    """Check that the package needed for files with the suffix of `path` is installed.

    Raises:
        ValueError: the package is not installed.
    """
    if path.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ValueError(
            f"{path} needs the package safetensors, which is not installed; run pip install "
            f"safetensors, or use a .pt file"
        )


def factors_file(text: str) -> Path:
    """Return `text` as the path of a new file."""
    return new_file(text, ".npz")


def new_file(text: str, *kinds: str) -> Path:
    """Return `text` as a path if the suffix is one of `kinds` and no such file exists."""
    path = path_of(text, *kinds)
    if path.exists():
        raise ValueError(f"{path} exists; use another name or delete it")
    return path


@dataclass(frozen=True)
class InspectOptions:
    """Check a checkpoint, and print its contents and K-FAC's spectra. Runs without MPI.

    Args:
        path: the directory of a checkpoint, or that of a run, whose newest checkpoint is used.
        picture: a file for a plot of the spectra, .pdf, .png or .svg; null for none.
    """

    path: Path = positional()
    picture: Path | None = read_by(picture, None)


@dataclass(frozen=True)
class ExportOptions:
    """Export a checkpoint's weights and factors for programs without mpikfac. Runs without MPI.

    Args:
        path: the directory of a checkpoint, or that of a run, whose newest checkpoint is used.
        weights: a new file for the weights of the model, .pt or .safetensors; null for none.
        average: a new file for the averaged weights of a run with `ema_decay`, .pt or .safetensors;
            null for none. Running statistics match the averaged weights if the run evaluated the
            network at the step of the checkpoint, for example at the end of the run.
        factors: a new file for the factors A and G of every layer, .npz; null for none.
    """

    path: Path = positional()
    weights: Path | None = read_by(weights_file, None)
    average: Path | None = read_by(weights_file, None)
    factors: Path | None = read_by(factors_file, None)


@dataclass(frozen=True)
class PackOptions:
    """Pack a folder of images into one HDF5 file that ranks can read quickly. Runs without MPI.

    Args:
        path: the folder, with train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg).
        out: the new file, .h5.
        size: the length in pixels to which the shorter side of larger images is reduced; they are
            re-encoded as JPEG of quality 95. Smaller images decode faster. null keeps the bytes of
            all images.
    """

    path: Path = positional()
    out: Path = positional()
    size: int | None = bounded(None, ">= 4")


INSPECT = CommandLine("mpikfac inspect", InspectOptions)
EXPORT = CommandLine("mpikfac export", ExportOptions)
PACK = CommandLine("mpikfac pack", PackOptions)
