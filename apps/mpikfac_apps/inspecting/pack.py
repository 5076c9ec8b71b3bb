"""Pack a folder of images into a single file, for `mpikfac train --data.name packed`. No MPI.

For example: mpikfac pack DIR images.h5 --size 256
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpikfac_apps import cli
from mpikfac_apps.images import folder, packed
from mpikfac_apps.inspecting.export import new_file
from mpikfac_apps.options.command_line import read
from mpikfac_apps.options.conflicts import check_pillow
from mpikfac_apps.options.fields import bounded, positional
from mpikfac_apps.text import number

SIZE = 224  # of images that a network gets; a packed file does not depend on the size


@dataclass(frozen=True)
class PackOptions:
    """Pack a folder of images into a single HDF5 file, which all ranks can read quickly. No MPI.

    Args:
        path: the folder, with train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg).
        out: the new file, .h5.
        size: the pixels of the shorter side of larger images, which are encoded anew as JPEG of
            quality 95. Smaller images decode faster. null keeps the bytes of all images.
    """

    path: Path = positional()
    out: Path = positional()
    size: int | None = bounded(None, ">= 4")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; return 2 after printing an error."""
    return cli.run("mpikfac pack", lambda: pack(read("mpikfac pack", PackOptions, argv)))


def pack(options: PackOptions) -> int:
    """Write the file, and print a line about the file; return 0.

    Raises:
        ValueError: the folder has another layout, or an image cannot be decoded.
        OSError: a file cannot be read or written.
    """
    check_pillow("mpikfac pack")
    out = new_file(str(options.out), ".h5")
    listing, classes = folder.with_names(str(options.path), SIZE)
    size = packed.write(listing, classes, out, options.size)
    trained, tested = len(listing.train_images), len(listing.test_images)
    print(
        f"wrote {out}: {number(trained, 'training image')}, {number(tested, 'test image')}, "
        f"classes: {len(classes)}, {size / 1e6:,.1f} MB"
    )
    return 0
