"""Change a checkpoint's manifest, and give the changed manifest a matching digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpikfac.checkpoint.manifest import _digest


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`."""
    return json.loads((path / "manifest.json").read_text())


def seal(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with a matching digest."""
    manifest.pop("digest", None)
    text = json.dumps(manifest | {"digest": _digest(manifest)})
    (path / "manifest.json").write_text(text)
