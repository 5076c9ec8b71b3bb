#!/bin/sh
# install.sh PROJECT: installs an MPI, Python and mpikfac into an image of Debian or Ubuntu, for
# Dockerfile and apptainer.def. Variables:
#   MPI          the MPI's package, of the host's kind: openmpi-bin (default) or mpich
#   TORCH_INDEX  a package index with another build of torch, for example for ROCm
set -eu

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    "${MPI:-openmpi-bin}"
rm -rf /var/lib/apt/lists/*

# The wheel of mpi4py loads the image's MPI, or any MPI that MPI4PY_LIBMPI names. A build of mpi4py
# with the image's MPI would load the image's MPI alone. The wheel looks for libmpi.so.12, the name
# that MPICH and its relatives agreed on; Debian's MPICH has a different name.
for library in /usr/lib/*/libmpich.so.12; do
    [ ! -e "$library" ] || ln -sf libmpich.so.12 "${library%/*}/libmpi.so.12"
done
python3 -m venv /opt/mpikfac
/opt/mpikfac/bin/pip install --no-cache-dir --constraint "$1/constraints.txt" \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$1[apps]"
