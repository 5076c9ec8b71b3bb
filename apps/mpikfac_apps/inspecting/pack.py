"""Pack a folder of images into one file for `mpikfac train --data.name packed`, without MPI.

For example: mpikfac pack DIR images.h5 --size 256
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikfac_apps import cli
from mpikfac_apps.images import folder, packed
from mpikfac_apps.inspecting.options import PACK, PackOptions, new_file
from mpikfac_apps.options.conflicts import check_pillow
from mpikfac_apps.text import number

SIZE = 224  # the side length of a network's images, which does not affect the packed file


def main(argv: Sequence[str] | None = None) -> int:
    """Write the packed file; return 0, or 2 after printing an error."""
    return cli.run("mpikfac pack", lambda: pack(PACK.read(argv)))


def pack(options: PackOptions) -> int:
    """Write the packed file, and print a line about it; return 0.

    Raises:
        ValueError: the folder does not have the expected layout, or an image cannot be decoded.
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
