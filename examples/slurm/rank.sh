#!/bin/bash
# One rank: what torch.distributed reads, from what srun sets; then the command. srun starts it; see train.sh.
# Leaves the command's exit status in EXIT_DIR: srun's own is that of ranks which it killed because another one failed.
set -uo pipefail

export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_WORLD_SIZE="${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))}"

# The signals are for the command, which gets them too; this shell lives on to note how it ended.
trap : USR1 TERM
"$@"
status=$?
if [[ -n "${EXIT_DIR:-}" ]]; then
    echo "$status" >"$EXIT_DIR/.rank-$RANK" && mv "$EXIT_DIR/.rank-$RANK" "$EXIT_DIR/rank-$RANK"
fi
exit "$status"
