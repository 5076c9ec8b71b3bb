#!/bin/sh
# bind_gpu.sh COMMAND...: starts a rank's command with a single visible GPU, the GPU of the local
# rank. The training program chooses the same GPU by itself. The script is for sites without GPU
# binding, and for an MPI or a library that opens every visible GPU.
set -eu

# Slurm's variable is last: under mpirun in a Slurm job, all ranks of a node inherit the variable of
# Slurm's daemon.
rank=${OMPI_COMM_WORLD_LOCAL_RANK-${MPI_LOCALRANKID-${PMI_LOCAL_RANK-${SLURM_LOCALID-}}}}
[ -n "$rank" ] || {
    echo "bind_gpu.sh: no launcher says the local rank; start it under mpirun or srun" >&2
    exit 2
}
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader)}
CUDA_VISIBLE_DEVICES=$(echo "$gpus" | tr -s ' ,' '\n' | awk -v rank="$rank" '
    { gpu[NR - 1] = $1 } END { print gpu[rank % NR] }')
export CUDA_VISIBLE_DEVICES
exec "$@"
