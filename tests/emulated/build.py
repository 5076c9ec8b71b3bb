"""Build the emulated device for the installed torch, if need be, with a C++ compiler.

From the project's folder: python tests/emulated/build.py
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("device.cpp")
LIBRARY = SOURCE.with_name("libdevice.so")
STAMP = SOURCE.with_name("libdevice.txt")


def main() -> int:
    """Build the library beside the source; return the exit code."""
    built_from = hashlib.sha256(SOURCE.read_bytes()).hexdigest() + f" {torch.__version__}\n"
    if LIBRARY.exists() and STAMP.exists() and STAMP.read_text() == built_from:
        return 0
    if torch.version.cuda or torch.version.hip:
        print("this torch has a real device; the emulated device needs a torch for CPUs")
        return 2
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        print(f"the emulated device needs a C++ compiler: {compiler} is not on PATH")
        return 2
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-w", str(SOURCE)]
    command += [f"-I{path}" for path in include_paths()]
    for path in library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    fresh = LIBRARY.with_suffix(".new")  # processes may have loaded the older library
    ran = subprocess.run(
        [*command, "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(fresh)], check=False
    )
    if ran.returncode == 0:
        fresh.replace(LIBRARY)
        STAMP.write_text(built_from)
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
