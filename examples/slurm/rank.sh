#!/bin/bash
# Runs a command as one rank, started by srun (see train.sh): translates srun's environment variables to those of torch.distributed.
# Writes the command's exit status to EXIT_DIR: the status of srun may be that of ranks which it killed because another one failed.
set -uo pipefail

export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_WORLD_SIZE="${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))}"

# The command receives these signals too and handles them; this shell must survive to record its exit status.
trap : USR1 TERM
"$@"
status=$?
if [[ -n "${EXIT_DIR:-}" ]]; then
    echo "$status" >"$EXIT_DIR/.rank-$RANK" && mv "$EXIT_DIR/.rank-$RANK" "$EXIT_DIR/rank-$RANK"
fi
exit "$status"
