#!/usr/bin/env bash
# A Slurm of four nodes on this machine, alive until the standard input ends:
#   unshare --pid --fork --kill-child --mount-proc --net bash cluster.sh
# The script prints "ready DIRECTORY"; nsenter reaches the cluster, with
# SLURM_CONF=DIRECTORY/slurm.conf. Processes, ports and shared memory belong to the namespaces: the
# cluster meets no second Slurm. After any end of the script nothing is left running: the kernel
# kills all processes of a namespace whose first process ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[ $$ = 1 ] || { echo "cluster.sh must be the first process of a PID namespace; see its head" >&2; exit 2; }

dir=$(mktemp -d /tmp/slurm.XXXXXX) # short: paths of sockets have at most 107 characters
trap 'kill -KILL -1; rm -rf "$dir"' EXIT
export SLURM_CONF=$dir/slurm.conf
exec 2>"$dir/daemons.log"
sed "s|@DIR@|$dir|" slurm.conf >"$SLURM_CONF"
mkdir "$dir"/{state,spool.n{1..4},tmp.n{1..4}}

ip link set lo up
ip address add 192.0.2.1/32 dev lo # names are resolved only with an address besides 127.0.0.1
mount -t tmpfs tmpfs /dev/shm

# Slurm loads libpmix.so, which Debian keeps in a package for developers.
pmix=$(echo /usr/lib/*/pmix2/lib)
cp -a "$pmix" "$dir/pmix"
ln -sf libpmix.so.2 "$dir/pmix/libpmix.so"
mount --bind "$dir/pmix" "$pmix"

mungekey --create --keyfile "$dir/munge.key"
munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
    --pid-file="$dir/munge.pid" --log-file="$dir/munge.log" --seed-file="$dir/munge.seed"
slurmctld -i
for node in n{1..4}; do slurmd -N "$node"; done
until [ "$(sinfo --noheader --partition=main --states=idle --format=%D)" = 4 ]; do sleep 0.1; done
echo "ready $dir"
read -r || true
