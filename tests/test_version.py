"""The version stands in setup.cfg; every copy agrees."""

from __future__ import annotations

import configparser
import re
from importlib import metadata
from pathlib import Path

import yaml

import mpikfac

ROOT = Path(__file__).parent.parent


def test_version_is_the_same_everywhere() -> None:
    """Oracle: setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version = setup["metadata"]["version"]
    assert mpikfac.__version__ == metadata.version("mpikfac") == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"(?<![/\d]){re.escape(version)}\b", changelog), f"{version} is not in it"
