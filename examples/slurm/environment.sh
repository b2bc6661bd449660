# shellcheck shell=bash disable=SC2034
# Sourced by every job script after the site's settings: environment of the job, and what scripts share.
# Sets PYTHON, LOG_DIR, and the commands ONCE and ON_RANKS that others are started with.

set -euo pipefail
: "${PROJECT_DIR:?is not set: source site.env first}" "${WORK_DIR:?is not set: source site.env first}"
: "${SLURM_JOB_ID:?is not set: this is a job script; see docs/slurm.md}"

cd "$WORK_DIR"

PYTHON="${VENV:+$VENV/bin/}python"
CONTAINER=()
if [[ -n "${CONTAINER_IMAGE:-}" ]]; then
    CONTAINER=(--container-image="$CONTAINER_IMAGE" --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$WORK_DIR")
fi

# All of a job's files; the same folder after a requeue. Array tasks share it, and differ by the names of their files.
LOG_DIR="$WORK_DIR/slurm-logs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
mkdir -p "$LOG_DIR"

export PYTHONPATH="$PROJECT_DIR${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1                # logs on disk are up to date when a rank is killed

# One thread per core of the rank. Without this every rank would start one per core of the node.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export TOKENIZERS_PARALLELISM=false      # its threads do not survive the forks of data workers

# NCCL and Gloo. Deliberately few: NCCL's own choices are right on most fabrics, and a wrong one is slow without a message.
if [[ -n "${NETWORK_INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME="$NETWORK_INTERFACE" GLOO_SOCKET_IFNAME="$NETWORK_INTERFACE"
fi
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"             # INFO shows rings, transports and why a fabric was not used
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1            # a failed or late collective ends the process instead of hanging it
export TORCH_NCCL_DUMP_ON_TIMEOUT=1                 # and leaves what each rank was doing,
export TORCH_FR_BUFFER_SIZE=2000                    # the last 2,000 collectives,
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$LOG_DIR/nccl-trace-rank-"  # in the job's folder
export CUDA_DEVICE_MAX_CONNECTIONS=1                # Megatron: kernels start in the order of the code, so that overlap works

say() {
    echo "$(date '+%F %T') [job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0}] $*"
}

# Prints a port that nothing on this host listens on. Each job has four of its own, below the range of outgoing connections, so
# that two jobs which share a host do not choose the same one.
free_port() {
    local base=$((15000 + SLURM_JOB_ID % 4000 * 4)) offset
    for offset in 0 1 2 3; do
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$((base + offset))") 2>/dev/null; then
            echo $((base + offset))
            return
        fi
    done
    say "found: ports $base to $((base + 3)) of $(hostname) are all taken. remedy: submit again (another job id has others)" >&2
    return 1
}

# How commands run in the site's software: arrays, not functions, since a function in the background is a shell of its own, and
# signals for srun would end that shell instead.
# ONCE: on the first node. ON_RANKS: as every rank of the job; block distribution makes ranks follow the order of the nodes.
ONCE=(srun --nodes=1 --ntasks=1 --overlap --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${CONTAINER[@]}")
ON_RANKS=(
    srun --ntasks="$SLURM_NTASKS" --distribution=block:block --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"
    --open-mode=append "${CONTAINER[@]}"
)
