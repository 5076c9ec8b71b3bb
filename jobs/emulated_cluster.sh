#!/usr/bin/env bash
# Emulates hosts on this machine, joined by links of a chosen rate, so that users without a slow
# network can measure a program on one. docs/extensions/emulated_cluster.md describes the emulation.
#
# The hosts live in namespaces (processes, mounts, network) of one process, the holder. Each job
# lives in a namespace of processes inside. When the holder or the job's launcher ends, for any
# reason, the kernel ends all processes in the namespace, and removes the links.
set -euo pipefail
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat >&2 <<'END'
usage: bash jobs/emulated_cluster.sh up HOSTS --rate RATE       up 4 --rate 1gbit
       bash jobs/emulated_cluster.sh rate RATE                  from now on; running jobs, too
       bash jobs/emulated_cluster.sh run [-n RANKS] COMMAND...  by default one rank per host
       bash jobs/emulated_cluster.sh status                     exit code 1 if none is up
       bash jobs/emulated_cluster.sh down                       ends running jobs, too
END
    exit 2
}

# Outside of the namespaces, DIR contains the holder's process ID and a lock. Inside, invisible from
# outside, DIR contains
#   net/node1 ...  the hosts' network namespaces     hosts  the hosts' names
#   ssh            the program that starts a command on a host
DIR=/run/mpikfac-${MPIKFAC_CLUSTER:=cluster}
NETWORK=10.77.0 # inside only: no conflict with addresses of this machine
holder=
PATH=$PATH:/usr/sbin:/sbin # for ip and tc; a user's PATH may lack both folders
TOOLS=(ip tc unshare nsenter setpriv setsid flock pgrep)

main() {
    check_machine
    case "${1-}/$#" in
        up/4) [ "$3" = --rate ] || usage; up "$2" "$4" ;;
        rate/2) check_rate "$2"; find_cluster; shape "$2" ;;
        run/*) run "${@:2}" ;;
        status/1) status ;;
        down/1) down ;;
        *) usage ;;
    esac
}

check_machine() {
    local tool
    [[ $MPIKFAC_CLUSTER =~ ^[a-z0-9_-]{1,30}$ ]] ||
        die "MPIKFAC_CLUSTER=$MPIKFAC_CLUSTER must be a name of at most 30 characters: a-z, 0-9, _ and -"
    [ "$(id -u)" = 0 ] || die "an emulated cluster needs root's rights; this is user $(id -un)"
    for tool in "${TOOLS[@]}"; do
        type -P "$tool" >/dev/null ||
            die "$tool is not installed; Debian has it in iproute2, util-linux or procps"
    done
}

# tc has units with misleading names: tc's "mbps" are megabytes per second.
check_rate() {
    [[ $1 =~ ^([1-9][0-9]{0,3}[km]|[1-9][0-9]?g)bit$ ]] ||
        die "RATE=$1 must be bits per second from 1kbit to 99gbit, such as 100mbit"
}

up() {
    local hosts=$1 rate=$2 said=
    [[ $hosts =~ ^([1-9]|[1-5][0-9]|6[0-4])$ ]] || die "HOSTS=$hosts must be a number from 1 to 64"
    check_rate "$rate"
    lock
    trap end EXIT
    # The holder reads a line before it stays: if this script dies first, the holder reads the end
    # of input and exits. The holder is a bash process, because bash reaps orphans. unshare, the
    # parent of the holder, keeps the lock (9).
    coproc HOLDER {
        exec setsid unshare --pid --fork --kill-child --mount-proc --propagation slave --net \
            bash -c 'exec 9<&-; echo ready; read -r && until false; do sleep 1d; done' 2>&1
    }
    read -r said <&"${HOLDER[0]}" || true
    [ "$said" = ready ] || die "no namespaces can be created here: $said"
    holder=$(pgrep --parent "$HOLDER_PID")
    trap 'end; die "the cluster could not be built; see above"' EXIT
    build "$hosts"
    shape "$rate"
    echo "$holder" >"$DIR/holder"
    echo >&"${HOLDER[1]}"
    trap - EXIT
    status
}

lock() {
    mkdir -p "$DIR"
    exec 9<"$DIR"
    # If `down` removes the directory in the meantime, two clusters could get the same name, so the
    # directory is checked again.
    { flock --timeout 1 9 && [ "$DIR" -ef /dev/fd/9 ]; } ||
        die "a cluster is already up (or starting, or ending); use another MPIKFAC_CLUSTER=NAME"
    rm -f "$DIR/holder" # left by a killed cluster
}

build() {
    local k
    inside mount -t tmpfs tmpfs "$DIR"
    inside mkdir "$DIR/net"
    inside ln -s "$ROOT/jobs/emulated_host.sh" "$DIR/ssh"
    echo "127.0.0.1 localhost" | inside tee "$DIR/hosts" >/dev/null
    inside mount --bind "$DIR/hosts" /etc/hosts
    inside ip link add bridge type bridge
    inside ip link set bridge up
    for k in $(seq "$1"); do add_host "node$k" "$NETWORK.$k"; done
}

# add_host HOST ADDRESS: creates a host with a link "eth0"; the bridge's end of the link has the
# host's name.
add_host() {
    echo "$2 $1" | inside tee -a "$DIR/hosts" >/dev/null
    inside touch "$DIR/net/$1"
    inside unshare --net="$DIR/net/$1" true
    inside ip link add "$1" type veth peer name eth0 netns "$DIR/net/$1"
    inside ip link set "$1" master bridge up
    at "$1" ip link set lo up
    at "$1" ip link set eth0 up
    at "$1" ip address add "$2/24" dev eth0
}

# shape RATE: sets the rate of all links, both ways. The burst is the bytes of a millisecond. With
# less, links do not reach 1 Gbit/s; with more, a short message would cost nothing on a slow link.
shape() {
    local host link
    for host in $(hosts); do
        for link in "inside tc qdisc replace dev $host" "at $host tc qdisc replace dev eth0"; do
            $link root tbf rate "$1" burst "$(burst "$1")" latency 50ms
        done
    done
}

# burst RATE: prints the bytes per millisecond, at least two packets.
burst() {
    local bits=${1/kbit/}
    bits=${bits/mbit/000}
    bits=${bits/gbit/000000}
    echo $((bits > 32000 ? bits / 8 : 4000))
}

# A cluster is up while the parent of the holder has the lock.
is_up() {
    [ -e "$DIR/holder" ] && ! flock --shared --nonblock "$DIR" true && holder=$(<"$DIR/holder")
}

find_cluster() {
    is_up || die "no cluster is up; start one: bash jobs/emulated_cluster.sh up HOSTS --rate RATE"
}

inside() { nsenter --target="$holder" --mount --net --pid "$@"; }
at() { inside nsenter --net="$DIR/net/$1" "${@:2}"; }
hosts() { inside ls -v "$DIR/net"; }

status() {
    is_up || { echo "no cluster is up"; return 1; }
    local rate
    rate=$(inside tc qdisc show dev node1 | grep -o 'rate [^ ]*')
    echo "up: hosts node1 to node$(hosts | wc -l), $rate each way"
}

run() {
    local ranks names count place=node
    find_cluster
    names=$(hosts)
    count=$(wc -w <<<"$names")
    ranks=$count
    if [ "${1-}" = -n ]; then
        [ $# -gt 2 ] || usage
        ranks=$2
        shift 2
        [[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || die "RANKS=$ranks must be a number from 1 to 9999"
    fi
    [ $# -gt 0 ] || usage
    find_open_mpi >&2
    # If all hosts get the same number of ranks, N consecutive ranks go to each host, as
    # `transport.ranks_per_node` needs. Otherwise, ranks are assigned to hosts in round-robin order.
    ((ranks % count)) || place=ppr:$((ranks / count)):node
    # shellcheck disable=SC2054  # Open MPI's lists have commas
    local options=(
        --prtemca plm ssh --prtemca plm_ssh_agent "$DIR/ssh" --prtemca prte_if_include eth0
        # Open MPI names directories by process number, and process numbers are the same in every
        # job.
        --prtemca prte_tmpdir_base /dev/shm
        --host "${names//$'\n'/,}" --map-by "$place:OVERSUBSCRIBE" --bind-to none
        --mca pml ob1 --mca btl self,sm,tcp --mca btl_tcp_if_include eth0 --mca osc ^ucx
        # Open MPI believes the number of slots in a host list; without the option, waiting ranks
        # would not yield their core.
        --mca mpi_yield_when_idle 1
    )
    # When this process ends, setpriv kills the next process, and then the job's namespace ends.
    exec nsenter --target="$holder" --mount --net --pid --wdns="$PWD" setpriv --pdeathsig KILL \
        unshare --pid --fork --kill-child --mount-proc \
        "$DIR/ssh" node1 "$(printf '%q ' "$MPIRUN" "${options[@]}" -n "$ranks" "$@")" </dev/null
}

# Find Open MPI 5: MPIRUN, or otherwise the mpirun of .venv; PATH then begins with .venv's programs.
find_open_mpi() {
    if [ -n "${MPIRUN:-}" ]; then
        use_site_mpi
    else
        make_venv
        install mpi
        MPIRUN=$VENV/bin/mpirun PATH=$VENV/bin:$PATH
        use_mpirun
    fi
    [[ $("$MPIRUN" --version 2>&1) = *"(Open MPI) 5"* ]] ||
        die "MPIRUN=$MPIRUN is not Open MPI 5; only Open MPI 5 can reach emulated hosts"
}

down() {
    [ -d "$DIR" ] || return 0
    is_up || true
    end
}

# The lock is free when all processes in the holder's namespaces have ended.
end() {
    exec 9<&-
    [ -z "$holder" ] || kill -KILL "$holder" 2>/dev/null || true
    flock --timeout 10 "$DIR" rm -rf "$DIR" || die "the cluster's processes do not end; try again"
}

main "$@"
