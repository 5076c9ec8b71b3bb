#!/bin/sh
# bind_gpu.sh COMMAND...: starts a rank's command with a single visible GPU, the GPU of the local
# rank. The training program chooses the same GPU by itself. The script is for sites without GPU
# binding, and for MPIs or libraries that open every visible GPU. The GPUs are the node's NVIDIA
# GPUs, or the list in CUDA_VISIBLE_DEVICES (NVIDIA), ROCR_VISIBLE_DEVICES (AMD) or
# ZE_AFFINITY_MASK (Intel).
set -eu

# Slurm's variable comes last: under mpirun in a Slurm job, all ranks of a node inherit the variable
# from Slurm's daemon.
rank=${OMPI_COMM_WORLD_LOCAL_RANK-${MPI_LOCALRANKID-${PMI_LOCAL_RANK-${SLURM_LOCALID-}}}}
[ -n "$rank" ] || {
    echo "bind_gpu.sh: no launcher has set the local rank; start it under mpirun or srun" >&2
    exit 2
}

# mine GPU,GPU...: prints the GPU of the local rank.
mine() {
    echo "$1" | tr -s ' ,' '\n' | awk -v rank="$rank" '{ gpu[NR - 1] = $1 } END { print gpu[rank % NR] }'
}

# Slurm may set the variables of all vendors. On NVIDIA nodes, only CUDA's variable counts.
if ! type nvidia-smi >/dev/null 2>&1 && [ -n "${ROCR_VISIBLE_DEVICES-}${ZE_AFFINITY_MASK-}" ]; then
    if [ -n "${ROCR_VISIBLE_DEVICES-}" ]; then
        ROCR_VISIBLE_DEVICES=$(mine "$ROCR_VISIBLE_DEVICES")
        export ROCR_VISIBLE_DEVICES
        # HIP would look up these numbers among the GPUs that ROCR_VISIBLE_DEVICES selects.
        unset HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES
    fi
    if [ -n "${ZE_AFFINITY_MASK-}" ]; then
        ZE_AFFINITY_MASK=$(mine "$ZE_AFFINITY_MASK")
        export ZE_AFFINITY_MASK
    fi
else
    gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader)}
    CUDA_VISIBLE_DEVICES=$(mine "$gpus")
    export CUDA_VISIBLE_DEVICES
fi
exec "$@"
