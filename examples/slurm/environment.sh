# shellcheck shell=bash disable=SC2034
# Sourced by every job script after the site's settings: environment of the job, and what scripts share.
# Sets PYTHON, LOG_DIR, CPUS, and the commands ONCE, ON_RANKS and ON_NODES that others are started with.

set -euo pipefail
: "${PROJECT_DIR:?is not set: source site.env first}" "${WORK_DIR:?is not set: source site.env first}"
: "${SLURM_JOB_ID:?is not set: this is a job script; see docs/slurm.md}"

cd "$WORK_DIR"

# Ends a job that cannot run, for a reason that a restart would not change.
refuse() {
    printf 'found: %s\nrequired: %s\nremedy: %s\n' "$1" "$2" "$3" >&2
    exit 2
}

# The site's own preparations, such as `module load`. Such commands use unset variables; one that fails ends the job.
if [[ -n "${SETUP_FILE:-}" ]]; then
    if [[ ! -r "$SETUP_FILE" ]]; then
        refuse "no file $SETUP_FILE on $(hostname)" "SETUP_FILE, on every node" "correct SETUP_FILE in the site file"
    fi
    set +eu
    trap 'refuse "$SETUP_FILE, line $LINENO: $BASH_COMMAND: status $?" "commands that succeed" "correct the file"' ERR
    # shellcheck source=/dev/null
    source "$SETUP_FILE"
    trap - ERR
    set -euo pipefail
fi

PYTHON="${VENV:+$VENV/bin/}python"
CONTAINER=()
if [[ -n "${CONTAINER_IMAGE:-}" ]]; then
    # A name of this attempt's own: the first step starts the container on a node, later ones enter it.
    CONTAINER=(
        --container-image="$CONTAINER_IMAGE" --container-name="dmtd-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
        --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$WORK_DIR"
    )
elif ! command -v "$PYTHON" >/dev/null; then
    refuse "no $PYTHON on $(hostname)" "a Python with this project's requirements" "correct VENV or SETUP_FILE in the site file"
fi

# CPU cores of each rank: --cpus-per-task where the job has it; else the site's number on GPU nodes. tools/launch.py does the same.
CPUS="${SLURM_CPUS_PER_TASK:-}"
if [[ -z "$CPUS" ]]; then
    CPUS=1
    if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then CPUS="$CPUS_PER_RANK"; fi
    RANKS="${SLURM_NTASKS_PER_NODE:-$(((${SLURM_NTASKS:-1} - 1) / SLURM_JOB_NUM_NODES + 1))}"
    if ((CPUS * RANKS > ${SLURM_CPUS_ON_NODE:-CPUS * RANKS})); then
        refuse "$SLURM_CPUS_ON_NODE CPU cores on $(hostname) for $RANKS ranks" "$CPUS for each (CPUS_PER_RANK)" \
            "submit with --cpus-per-task=$CPUS or --exclusive, or correct CPUS_PER_RANK in the site file"
    fi
fi

# All of a job's files; the same folder after a requeue. Array tasks share it, and differ by the names of their files.
LOG_DIR="$WORK_DIR/slurm-logs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
mkdir -p "$LOG_DIR"

export PYTHONPATH="$PROJECT_DIR${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1                # logs on disk are up to date when a rank is killed

# One thread per core of the rank. Without this every rank would start one per core of the node.
export OMP_NUM_THREADS="$CPUS"
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

# The name of the job's first node; or its address (RENDEZVOUS), as Slurm on the last node sees it.
first_host() {
    local hosts
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    if [[ "${RENDEZVOUS:-hostname}" == hostname ]]; then
        echo "${hosts[0]}"
    else
        # shellcheck disable=SC2016 # the variable is srun's
        srun --nodes=1 --ntasks=1 --overlap --nodelist="${hosts[-1]}" bash -c 'echo "$SLURM_LAUNCH_NODE_IPADDR"'
    fi
}

# How commands run in the site's software: arrays, not functions, since a function in the background is a shell of its own, and
# signals for srun would end that shell instead.
# ONCE: on the first node. ON_RANKS: as every rank of the job; block distribution makes ranks follow the order of the nodes.
# ON_NODES: once on each node, outside the container.
ONCE=(srun --nodes=1 --ntasks=1 --overlap --cpus-per-task="$CPUS" "${CONTAINER[@]}")
ON_RANKS=(srun --ntasks="${SLURM_NTASKS:-1}" --distribution=block:block --cpus-per-task="$CPUS" --open-mode=append "${CONTAINER[@]}")
ON_NODES=(srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --cpus-per-task=1)
