#!/usr/bin/env bash
# emulated_host.sh [OPTION...] HOST COMMAND...: replaces ssh for emulated hosts. The command gets
# the host's own name, shared memory and network. Otherwise MPI would see a single node.
set -euo pipefail
while [[ $1 = -* ]]; do shift; done
# shellcheck disable=SC2016  # the inner shell expands
exec nsenter --net="$(dirname "$0")/net/$1" unshare --uts --mount --ipc bash -euc '
    echo "$0" >/proc/sys/kernel/hostname
    mount -t tmpfs tmpfs /dev/shm
    exec bash -c "$1"' "$1" "${*:2}"
