"""Find the MPI that mpi4py loads, and how it starts ranks on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

OPEN, INTEL, MPICH = "Open MPI", "Intel(R) MPI", "MPICH"
# Names of launchers, in order of preference. Intel's mpirun is a script, which leaves ranks behind
# when it ends; Debian's mpirun can be the launcher of another MPI.
STARTERS = {
    OPEN: ("mpirun.openmpi", "mpirun"),
    INTEL: ("mpiexec.hydra", "mpirun"),
    MPICH: ("mpiexec.hydra", "mpiexec.mpich", "mpiexec", "mpirun"),
}
PLUGINS = {OPEN: "pmix", INTEL: "pmi2", MPICH: "pmi2"}  # for `srun --mpi`
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
LOOK = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0])
with open("/proc/self/maps") as maps:
    print(next(line.split()[-1] for line in maps if "/libmpi" in line))
"""
REMEDY = "install one with pip install 'mpikfac[mpi]', or load the module of your site's MPI"


@dataclass(frozen=True)
class Mpi:
    """The MPI with which ranks are started.

    Attributes:
        maker: OPEN, INTEL or MPICH; derivatives of MPICH count as MPICH.
        library: the path of the library.
        starter: the program that starts ranks.
    """

    maker: str
    library: Path
    starter: str

    @property
    def of_environment(self) -> bool:
        """Whether the library is part of this Python's environment, for example from a wheel."""
        return self.library.is_relative_to(Path(sys.prefix).resolve())


def loaded_mpi(environ: Mapping[str, str]) -> Mpi:
    """Return the MPI that mpi4py loads; the variable MPIRUN can name its launcher.

    Raises:
        ValueError: there is no MPI library, or no launcher.
    """
    asked = environ.get("MPIRUN")
    starter = shutil.which(asked) if asked else None
    if asked and starter is None:
        raise ValueError(
            f"MPIRUN={asked} is not a program; set MPIRUN to the path of mpirun, or unset it"
        )
    looked = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**environ, **library_path(starter, environ)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if looked.returncode:
        reason = (looked.stderr.strip().splitlines() or ["no reason"])[-1]
        raise ValueError(f"mpi4py does not load an MPI library ({reason}): {REMEDY}")
    version, library = looked.stdout.split("\n")[:2]
    maker = next((name for name in (OPEN, INTEL) if version.startswith(name)), MPICH)
    starter = starter or starter_of(maker, Path(library), environ.get("PATH"))
    if starter is None:
        raise ValueError(
            f"{version.split(',')[0].strip()} has no launcher next to {library} or on PATH; set "
            f"MPIRUN=FILE to name it"
        )
    return Mpi(maker, Path(library), starter)


def library_path(starter: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes mpi4py load the library of the given launcher."""
    if starter is None or "MPI4PY_LIBMPI" in environ:
        return {}
    prefix = Path(starter).resolve().parent.parent
    # The empty entry makes the system's loader search LD_LIBRARY_PATH.
    return {"MPI4PY_LIBMPI": f"{prefix}/lib:{prefix}/lib64::{sys.prefix}/lib"}


def starter_of(maker: str, library: Path, path: str | None) -> str | None:
    """Return the launcher next to a library or, failing that, on `path`; None if there is none."""
    folders = [folder / "bin" for folder in library.parents]
    places = os.pathsep.join([*map(str, folders), path or os.defpath])
    for folder in places.split(os.pathsep):
        for name in STARTERS[maker]:
            if starter := shutil.which(name, path=folder):
                return starter
    return None


def command(
    mpi: Mpi, ranks: int, program: Collection[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the command that starts a program on ranks; MPIRUN_FLAGS replaces `usual_flags`.

    Raises:
        ValueError: Open MPI would refuse to start ranks for root.
    """
    if mpi.maker == OPEN and os.geteuid() == 0 and any(environ.get(n) != "1" for n in AS_ROOT):
        raise ValueError(
            f"Open MPI does not start ranks for root; use another account, or allow root, as is "
            f"common in containers: export {'=1 '.join(AS_ROOT)}=1"
        )
    flags = shlex.split(environ.get("MPIRUN_FLAGS", " ".join(usual_flags(mpi, ranks))))
    return [mpi.starter, *flags, "-n", str(ranks), *program]


def usual_flags(mpi: Mpi, ranks: int) -> list[str]:
    """Return the options for a job whose ranks all run on this machine.

    If there are more ranks than cores, Open MPI needs --oversubscribe, with which waiting ranks
    yield their core. Otherwise, it needs --bind-to none: by default, it would bind each rank to a
    core, and two jobs would share core 0. MPICH and Intel MPI need no option.
    """
    if mpi.maker != OPEN:
        return []
    return ["--oversubscribe"] if ranks > cores() else ["--bind-to", "none"]


def cores() -> int:
    """Return the number of cores that this process can use, not counting hardware threads."""
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    shared = set()
    for number in os.sched_getaffinity(0):
        try:
            shared.add(Path(siblings.format(number)).read_text(encoding="ascii"))
        except OSError:  # a container without /sys
            shared.add(str(number))
    return len(shared)


def variables(mpi: Mpi, ranks: int, memory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the job.

    Args:
        memory: a directory for this job alone, on an in-memory file system.
    """
    defaults = {"HOME": os.path.expanduser("~")}  # Open MPI does not start without it
    if "MPIRUN_FLAGS" not in environ:  # all ranks are on this machine
        defaults["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if mpi.maker == OPEN and mpi.of_environment:
        # Searching for fast networks takes a second. A site's own MPI keeps the site's settings.
        defaults |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
        # An aborted job leaves its shared memory behind, under a name that another job can use.
        defaults["OMPI_MCA_btl_sm_backing_directory"] = str(memory)
    chosen = library_path(mpi.starter if "MPIRUN" in environ else None, environ)
    return {**defaults, **environ, **chosen}
