"""The command without the packages of the extra `apps`."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

from mpikfac_apps import __main__ as program

ROOT = Path(__file__).parents[2]
MODULES = {"pyyaml": "yaml"}  # of packages with another name


def packages(key: str, text: str) -> set[str]:
    """Return the packages of a list of requirements in setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return {re.split(r"[\[>]", line)[0].lower() for line in setup[key][text].split()}


def test_a_missing_extra_is_one_line():
    """Oracle: code 2, and a line with the package and the remedy."""
    hidden = "import sys; sys.modules['jsonargparse'] = None"
    start = "from mpikfac_apps.__main__ import main; sys.exit(main(['train']))"
    command = [sys.executable, "-c", f"{hidden}; {start}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    told = "mpikfac train needs the package jsonargparse, which is not installed; run pip install"
    assert (ended.returncode, ended.stderr) == (2, f"{told} 'mpikfac[apps]'\n")


def test_the_extra_is_what_the_command_knows():
    """Oracle: setup.cfg; docstring_parser comes with jsonargparse[signatures]."""
    found = {MODULES.get(name, name) for name in packages("options.extras_require", "apps")}
    assert found | {"docstring_parser"} == set(program.EXTRA)


def test_the_library_asks_for_little():
    """Oracle: the list, by hand."""
    expected = {"torch", "numpy", "mpi4py", "h5py", "blake3", "lazy_loader"}
    assert packages("options", "install_requires") == expected
