"""Check a checkpoint, and print its contents and K-FAC's spectra. Runs without MPI.

    mpikfac inspect runs/a --picture spectra.png

The exit code is 1 if the checkpoint is damaged, or has an unknown format version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from torch import Tensor

import mpikfac
from mpikfac import files
from mpikfac.plan import named_types
from mpikfac.preconditioners import PRECONDITIONERS, Eigen, Preconditioner
from mpikfac_apps.cli import checkpoint_at, complain
from mpikfac_apps.inspecting import spectra
from mpikfac_apps.inspecting.options import INSPECT
from mpikfac_apps.options import documents
from mpikfac_apps.text import show, table

ADAPTED = "kfac/damping"  # the current value of an adapted damping


@dataclass(frozen=True)
class Inversion:
    """How a run inverts factors.

    Attributes:
        names: the name of the run's preconditioner, then each layer with a different one, such as
            "eigen, conv1: inverse".
        run: the run's preconditioner.
        damping: the damping; 0 if it is unknown.
        relative: whether the damping is relative to the mean eigenvalues of the factors.
    """

    names: str
    run: Preconditioner
    damping: float = 0.0
    relative: bool = False

    def preconditioner_of(self, layer: str) -> Preconditioner:
        """Return the preconditioner of a layer."""
        _, *others = self.names.split(", ")
        name = dict(assignment.split(": ") for assignment in others).get(layer, "")
        return PRECONDITIONERS.get(name, self.run)

    def described(self) -> str:
        """Return a description of the inversion: the damping and the preconditioners."""
        kind = "relative damping" if self.relative else "damping"
        return (
            f"{kind} {self.damping:g} and preconditioner {self.names}"
            if self.damping
            else "no damping (none is known)"
        )


NONE = Inversion(Eigen.name, Eigen())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the contents of a checkpoint; return 1 if it is damaged, 2 if there is none."""
    try:
        options = INSPECT.read(argv)
        checkpoint = mpikfac.checkpoint.read_checkpoint(checkpoint_at(options.path))
        if options.picture and not spectra.layers(checkpoint):
            raise ValueError(
                f"{checkpoint.path} has no factors to plot, because its run did not store any"
            )
        faults = faults_of(checkpoint)
        sections = [heading(checkpoint), shards(checkpoint, faults), contents(checkpoint)]
        layer_spectra = [] if any(faults.values()) else spectra.of(checkpoint)
        inversion = inversion_of(checkpoint) if layer_spectra else NONE
        conditions = [
            spectrum.condition(
                inversion.preconditioner_of(spectrum.layer), inversion.damping, inversion.relative
            )
            for spectrum in layer_spectra
        ]
        if layer_spectra:
            sections.append(curvature(layer_spectra, conditions, inversion.described()))
        show(sections)
        if layer_spectra and options.picture:
            title = f"{checkpoint.path}, condition number with {inversion.described()}"
            spectra.draw(layer_spectra, conditions, title, options.picture)
    except mpikfac.UserError as error:
        complain("mpikfac inspect", error)
        return 1
    except (OSError, ValueError) as error:
        complain("mpikfac inspect", error)
        return 2
    return int(any(faults.values()))


def faults_of(checkpoint: mpikfac.checkpoint.Checkpoint) -> dict[str, str]:
    """Return the error in each shard by file name, or "" if all its items can be read."""
    faults = dict.fromkeys(checkpoint.shards, "")
    for name, item in checkpoint.described().items():
        if not faults[item["shard"]]:
            try:
                checkpoint[name]
            except mpikfac.UserError as error:
                faults[item["shard"]] = str(error)
    return faults


def heading(checkpoint: mpikfac.checkpoint.Checkpoint) -> list[str]:
    """Return lines with the path, step, format version, time and size of the checkpoint."""
    manifest = checkpoint.path / "manifest.json"
    version = files.read_json(manifest)["version"]
    written = datetime.fromtimestamp(manifest.stat().st_mtime).astimezone()
    size = sum(shard["size"] for shard in checkpoint.shards.values())
    return [
        f"{checkpoint.path}: step {checkpoint.step}",
        f"format version {version}, written {written:%Y-%m-%d %H:%M:%S %z}, {size:,} bytes",
    ]


def shards(checkpoint: mpikfac.checkpoint.Checkpoint, faults: dict[str, str]) -> list[str]:
    """Return lines with the size and state of every file, and the errors in damaged files."""
    rows = [("file", "bytes", "BLAKE3 and items")]
    for file, shard in checkpoint.shards.items():
        rows.append((file, f"{shard['size']:,}", "damaged" if faults[file] else "ok"))
    return ["Shards", *table(rows), *filter(None, faults.values())]


def contents(checkpoint: mpikfac.checkpoint.Checkpoint) -> list[str]:
    """Return lines with the number of items and the number of bytes in every group."""
    items, sizes = Counter[str](), Counter[str]()
    for name, item in checkpoint.described().items():
        items[group(name)] += 1
        sizes[group(name)] += item["bytes"]
    rows = [(name, str(items[name]), f"{sizes[name]:,}") for name in sorted(items)]
    return ["Contents", *table([("group", "items", "bytes"), *rows])]


def group(item: str) -> str:
    """Return the group of an item: model, optimizer, factors, bases, run, ..."""
    first, *parts = item.split("/")
    return parts[0] if first == "kfac" and len(parts) > 1 else first


def curvature(
    layer_spectra: Sequence[spectra.Spectrum], conditions: Sequence[float], inversion: str
) -> list[str]:
    """Return lines with statistics of all layers' spectra."""
    eigenvalues = ("mean", "largest", "smallest")
    rows: list[tuple[str, ...]] = [("layer", "A", *eigenvalues, "G", *eigenvalues, "condition")]
    for spectrum, condition in zip(layer_spectra, conditions):
        sides = *numbers(spectrum.a), *numbers(spectrum.g)
        rows.append((spectrum.layer, *sides, f"{condition:.1e}"))
    what = f"condition number with {inversion}"
    return [f"Orders and eigenvalues of A and G; {what}", *table(rows)]


def numbers(values: Tensor) -> tuple[str, ...]:
    """Return the number, mean, maximum and minimum of eigenvalues; dashes if there are none."""
    if not len(values):
        return ("-",) * 4
    return str(len(values)), *(f"{value:.2e}" for value in (values.mean(), values[-1], values[0]))


def inversion_of(checkpoint: mpikfac.checkpoint.Checkpoint) -> Inversion:
    """Return how the run that wrote a checkpoint inverts factors.

    If the run's config.yaml is missing or does not determine the damping, eigenbases without
    damping are assumed. An adapted damping is read from the checkpoint.
    """
    folder = checkpoint.path.resolve().parent.parent
    try:
        content = documents.loaded(files.read_text(folder / "config.yaml"))
    except (OSError, ValueError):
        return NONE
    chosen = content.get("kfac") if isinstance(content, dict) else None
    if not isinstance(chosen, dict):
        return NONE
    names = checkpoint.get("kfac/preconditioner")
    first = names.partition(",")[0] if isinstance(names, str) else ""
    run = _preconditioner(chosen.get("preconditioner")) or PRECONDITIONERS.get(first)
    share = chosen.get("relative_damping")
    relative = share not in (None, False)
    number = share if relative and share is not True else chosen.get("damping")
    damping = checkpoint.get(ADAPTED, number)
    if not (run and files.has_form(damping, float) and damping > 0):
        return NONE
    return Inversion(str(names or run.form.name), run, float(damping), relative)


def _preconditioner(chosen: Any) -> Preconditioner | None:
    """Return the preconditioner of a run's options; None if it is unknown."""
    if not isinstance(chosen, Mapping) or chosen.get("type") not in named_types(Preconditioner):
        return None
    kind = named_types(Preconditioner)[chosen["type"]]
    names = {field.name for field in fields(kind)} - {"dtype"}  # not needed for condition numbers
    return kind(**{name: value for name, value in chosen.items() if name in names})
