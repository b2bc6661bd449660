# shellcheck shell=bash disable=SC2034
# Sourced by every job script after the site's settings: environment variables, and functions that the scripts share.
# Sets PYTHON, LOG_DIR, CPUS, and the command prefixes ONCE, ON_RANKS and ON_NODES.

set -euo pipefail
: "${PROJECT_DIR:?is not set: source site.env first}" "${WORK_DIR:?is not set: source site.env first}"
: "${SLURM_JOB_ID:?is not set: this is a job script; see docs/slurm.md}"

cd "$WORK_DIR"

# Ends a job that cannot run and that a restart would not help.
refuse() {
    printf 'found: %s\nrequired: %s\nremedy: %s\n' "$1" "$2" "$3" >&2
    exit 2
}

# The site's own setup, such as `module load`. Such commands may use unset variables; the first one that fails ends the job.
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
    # A name unique to this attempt: the first step on a node starts the container, later steps enter it.
    CONTAINER=(
        --container-image="$CONTAINER_IMAGE" --container-name="dmtd-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
        --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$WORK_DIR"
    )
elif ! command -v "$PYTHON" >/dev/null; then
    refuse "no $PYTHON on $(hostname)" "a Python with this project's requirements" "correct VENV or SETUP_FILE in the site file"
fi

# CPU cores per rank: the job's --cpus-per-task if given, else CPUS_PER_RANK for GPU jobs. tools/launch.py follows the same rule.
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

# Folder for all files of a job, also after a requeue. Array tasks share it under different file names.
LOG_DIR="$WORK_DIR/slurm-logs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
mkdir -p "$LOG_DIR"

export PYTHONPATH="$PROJECT_DIR${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1                # keeps logs on disk up to date if a rank is killed

# One thread per core of the rank. By default every rank would start one per core of the node.
export OMP_NUM_THREADS="$CPUS"
export TOKENIZERS_PARALLELISM=false      # its threads do not survive forks

# NCCL and Gloo. Deliberately few settings: NCCL's defaults suit most fabrics, and a wrong setting is slow without any message.
if [[ -n "${NETWORK_INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME="$NETWORK_INTERFACE" GLOO_SOCKET_IFNAME="$NETWORK_INTERFACE"
fi
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"             # INFO shows rings, transports and why a fabric was not used
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1            # a failed or timed-out collective ends the process instead of hanging it
export TORCH_NCCL_DUMP_ON_TIMEOUT=1                 # and dumps what each rank was doing:
export TORCH_FR_BUFFER_SIZE=2000                    # its last 2,000 collectives,
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$LOG_DIR/nccl-trace-rank-"  # to the job's folder
export CUDA_DEVICE_MAX_CONNECTIONS=1                # Megatron: kernels start in program order, so that overlap works

say() {
    echo "$(date '+%F %T') [job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0}] $*"
}

# Prints a free port of this host. Each job has four of its own, below the range of ephemeral ports, so that two jobs on one host do
# not choose the same one.
free_port() {
    local base=$((15000 + SLURM_JOB_ID % 4000 * 4)) offset
    for offset in 0 1 2 3; do
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$((base + offset))") 2>/dev/null; then
            echo $((base + offset))
            return
        fi
    done
    say "found: ports $base to $((base + 3)) of $(hostname) are all taken. remedy: submit again (another job has other ports)" >&2
    return 1
}

# Prints the name of the job's first node or, with RENDEZVOUS=address, its address as seen by Slurm on the last node.
first_host() {
    local hosts
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    if [[ "${RENDEZVOUS:-hostname}" == hostname ]]; then
        echo "${hosts[0]}"
    else
        # shellcheck disable=SC2016 # srun sets the variable
        srun --nodes=1 --ntasks=1 --overlap --nodelist="${hosts[-1]}" bash -c 'echo "$SLURM_LAUNCH_NODE_IPADDR"'
    fi
}

# Prefixes that run a command in the site's software environment. Arrays, not functions: a function in the background is a shell of its
# own, which would receive the signals meant for srun.
# ONCE: on the first node. ON_RANKS: on every rank; with block distribution, ranks are in node order. ON_NODES: once per node, outside
# the container.
ONCE=(srun --nodes=1 --ntasks=1 --overlap --cpus-per-task="$CPUS" "${CONTAINER[@]}")
ON_RANKS=(srun --ntasks="${SLURM_NTASKS:-1}" --distribution=block:block --cpus-per-task="$CPUS" --open-mode=append "${CONTAINER[@]}")
ON_NODES=(srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --cpus-per-task=1)
