"""Read a volume with a class for each voxel, and cut it into crops.

The default volume is the T1 image of the template MNI152, which comes with nilearn; the classes are
grey matter, white matter, and everything else. nibabel reads the files.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpikfac_apps.problems import own

LIMIT = 2**27  # maximum number of voxels in a file; every rank keeps them in memory
TEMPLATE = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"
BRIGHT = 99.9  # the percentile of brightness that is mapped to 255; brighter voxels are clipped
ACROSS = 1  # the axis along which a volume is halved; in MNI152, from back to front


@dataclass(frozen=True)
class Volume:
    """A volume with a class for each voxel.

    Attributes:
        voxels: bytes `[depth, height, width]`.
        classes: the class of each voxel, in the same shape; 0 for voxels without a label.
        about: a line with the volume's origin, size and checksum, to check that runs use the same
            volume.
    """

    voxels: np.ndarray
    classes: np.ndarray
    about: str

    def halves(self) -> tuple[Volume, Volume]:
        """Return the halves of the volume, which do not overlap."""
        parts = (np.array_split(part, 2, ACROSS) for part in (self.voxels, self.classes))
        (first, second), classes = parts
        return Volume(first, classes[0], self.about), Volume(second, classes[1], self.about)

    def crops(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the disjoint crops with sides of `size` voxels that contain a labelled voxel.

        Returns:
            Bytes `[crops, 1, size, size, size]`, and classes `[crops, size, size, size]`.

        Raises:
            ValueError: no crop contains a labelled voxel.
        """
        voxels, classes = (torch.from_numpy(cut(v, size)) for v in (self.voxels, self.classes))
        named = (classes > 0).flatten(1).any(1)
        if not named.any():
            raise ValueError(
                f"data.size={size}: a half of the volume ({'x'.join(map(str, self.voxels.shape))} "
                f"voxels) contains no crop with a class above 0; use a smaller size"
            )
        return voxels[named, None], classes[named]


def cut(values: np.ndarray, size: int) -> np.ndarray:
    """Cut values into cubes `[cubes, size, size, size]`; incomplete cubes are left out."""
    d, h, w = (side // size for side in values.shape)
    whole = values[: d * size, : h * size, : w * size]
    grid = whole.reshape(d, size, h, size, w, size).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(grid).reshape(-1, size, size, size)


def read(path: str | None = None) -> Volume:
    """Return the volume of a folder with image.nii.gz and labels.nii.gz, or of MNI152.

    Raises:
        ValueError: a package is missing, a file is not a volume, or the two files do not match; the
            message states a remedy.
    """
    if path is None:
        image, classes = template()
    else:
        image, labels = (array(Path(path) / f"{name}.nii.gz") for name in ("image", "labels"))
        classes = labels.astype(np.uint8)
        if image.shape != labels.shape or not (classes == labels).all():
            raise ValueError(
                f"data.path={path}: labels.nii.gz must contain whole numbers from 0 to 255 in the "
                f"shape of image.nii.gz, {list(image.shape)}, not {list(labels.shape)}"
            )
    brightest = max(float(np.percentile(image, BRIGHT)), 1e-12)
    voxels = np.rint(255 * np.clip(image / brightest, 0, 1)).astype(np.uint8)
    size = f"{'x'.join(map(str, voxels.shape))} voxels, CRC-32 {zlib.crc32(voxels.tobytes()):08x}"
    return Volume(voxels, classes, f"volume of {path or 'MNI152'}: {size}")


def template() -> tuple[np.ndarray, np.ndarray]:
    """Return the T1 image of MNI152 and the classes: 1 for grey matter, 2 for white matter.

    Each voxel has the class of the tissue that fills more than half of it, or 0 if neither does.

    Raises:
        ValueError: nilearn is not installed.
    """
    found = importlib.util.find_spec("nilearn")  # the package itself is not imported
    if found is None or not found.submodule_search_locations:
        raise ValueError(missing("nilearn", "data.path=null", "--no-deps "))
    folder = Path(found.submodule_search_locations[0]) / "datasets" / "data"
    t1, grey, white = (array(folder / TEMPLATE.format(name)) for name in ("t1", "gm", "wm"))
    return t1, np.where(grey > 127, 1, np.where(white > 127, 2, 0)).astype(np.uint8)


def array(file: Path) -> np.ndarray:
    """Return the values of a three-dimensional NIfTI file.

    Raises:
        ValueError: nibabel is not installed, or the file is not a volume.
    """
    try:
        import nibabel
    except ImportError as error:
        raise ValueError(missing("nibabel", "data.name=volume")) from error
    with own.one_line_errors(f"reading {file}"):
        image: Any = nibabel.load(file)
        if len(image.shape) != 3 or math.prod(image.shape) > LIMIT:
            raise ValueError(f"{list(image.shape)} must have three sides and <= {LIMIT:,} voxels")
        return np.asarray(image.dataobj)


def missing(package: str, what: str, how: str = "") -> str:
    """Return the error message about a package that is not installed."""
    remedy = f"run pip install {how}{package}"
    return f"{what} needs the package {package}, which is not installed; {remedy}"
