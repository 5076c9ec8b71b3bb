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
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    versions = {
        "mpikfac": mpikfac.__version__,
        "installed": metadata.version("mpikfac"),
        "CITATION.cff": yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"],
        "CHANGELOG.md": newest[1],
    }
    assert versions == dict.fromkeys(versions, setup["metadata"]["version"])
