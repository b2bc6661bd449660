# shellcheck shell=bash
# Sourced at the end of a training script: preflight checks, then tools/train.py with one process per rank, then the job's end.
# OPTIONS holds the options of tools/train.py.
#
#   exit status of the trainer                       the job
#   0 done                                           ends with 0
#   2 refused, 4 non-finite, 6 or 7 a full disk      ends with that status: a restart would not help
#   3 stopped by a signal after a save               is requeued and continues
#   other: a crash, a stall, a lost rank             is requeued and resumes from the newest checkpoint
#
# A job that restarts more than MAX_RESTARTS times without a newer checkpoint ends with the trainer's last status. If a node dies, Slurm
# itself requeues the job (--requeue). A cancelled job (scancel JOB) is never requeued; see ending.sh.

# shellcheck source=environment.sh
source "$PROJECT_DIR/examples/slurm/environment.sh"

mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR="$(first_host)" # rank 0's node: ranks are in node order
MASTER_PORT="$(free_port)"
EXIT_DIR="$LOG_DIR/exits-${SLURM_RESTART_COUNT:-0}"
export MASTER_ADDR MASTER_PORT EXIT_DIR
RESTARTS="$LOG_DIR/restarts.json"
SAVE_AND_STOP=0
STEP_PID=0

# Slurm sends USR1 some minutes before the time limit (--signal), to this shell only, and TERM when it stops the job: pass both on to the
# ranks. Whether the job is requeued is decided when the ranks have ended (ending.sh).
# shellcheck disable=SC2317 # the trap calls it
save_and_stop() {
    local state
    SAVE_AND_STOP=1
    if ((STEP_PID)); then kill -USR1 "$STEP_PID" 2>/dev/null || true; fi
    state="$(state_of_job)"
    say "asked to save and stop by $1; state of the job: $state"
    if is_stopped_by_slurm "$state"; then requeue_at_once; fi
}
trap 'save_and_stop USR1' USR1
trap 'save_and_stop TERM' TERM

restarts() {
    "${ONCE[@]}" "$PYTHON" -m megatron_dmtd.launch.restarts "$1" --state "$RESTARTS" --limit "$MAX_RESTARTS" "${@:2}" -- "${OPTIONS[@]}"
}

# shellcheck source=ending.sh
source "$PROJECT_DIR/examples/slurm/ending.sh"

# Checks that the nodes can find each other; ranks would wait for minutes and not name the cause. If all nodes have a problem, the job
# ends; if only some have, it is requeued without them.
check_nodes() {
    local problems nodes strangers status=0
    problems="$("${ON_NODES[@]}" bash -c "$(<"$PROJECT_DIR/examples/slurm/node.sh")" node.sh "$MASTER_ADDR" "$PROJECT_DIR" \
        "${NETWORK_INTERFACE:-}")" || status=$?
    if ((status)); then
        say "the nodes could not be checked: srun ended with status $status"
        restart_or_end "$status"
    fi
    if [[ -z "$problems" ]]; then return; fi
    mapfile -t nodes < <(cut -d : -f 1 <<<"$problems" | sort -u)
    printf 'found: %s\n' "$(head -n 8 <<<"$problems")"
    echo "required: nodes that have this checkout and can find each other"
    echo "remedy: set RENDEZVOUS=address in the site file if nodes do not know each other's names, and NETWORK_INTERFACE to choose the" \
        "network; or correct the site file or the nodes"
    # the first node usually knows its own name even if no other node does
    strangers="$(grep -c "does not know the name" <<<"$problems" || true)"
    if ((${#nodes[@]} == SLURM_JOB_NUM_NODES || (strangers && strangers == SLURM_JOB_NUM_NODES - 1))); then exit 2; fi
    restart_or_end 8 "$(IFS=,; echo "${nodes[*]}")"
}

# Prints the trainer's status, given the ranks' statuses: those that a restart cannot help come first, killed ranks last.
verdict() {
    local srun_status="$1" status statuses
    statuses="$(cat "$EXIT_DIR"/rank-* 2>/dev/null | sort -un | tr '\n' ' ')"
    for status in 2 4 6 7 5 1; do
        if [[ " $statuses" == *" $status "* ]]; then
            echo "$status"
            return
        fi
    done
    # Every rank that exited on its own had saved.
    if [[ "$statuses" == "3 " || "$statuses" == "0 3 " ]]; then
        echo 3
    else
        echo "$srun_status"
    fi
}

# Waits for the step in the background. A trapped signal interrupts `wait`, which then has to be repeated.
wait_for_step() {
    local status=0
    while :; do
        status=0
        wait "$STEP_PID" || status=$?
        if ! kill -0 "$STEP_PID" 2>/dev/null; then break; fi
    done
    STEP_PID=0
    return "$status"
}

rm -rf "$EXIT_DIR" && mkdir -p "$EXIT_DIR"
say "nodes $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks, rendezvous at $MASTER_ADDR:$MASTER_PORT; logs of the ranks in $LOG_DIR"
status=0
restarts begin || status=$?
case "$status" in
    0) ;;
    7) exit "$(sed -nE 's/.*"last_status": ([0-9]+).*/\1/p' "$RESTARTS")" ;;
    # the step was ended by a signal
    130 | 138 | 143) restart_or_end "$status" ;;
    *) exit "$status" ;;
esac
if ((SAVE_AND_STOP)); then restart_or_end 3; fi

check_nodes
say "preflight"
EXIT_DIR="" "${ON_RANKS[@]}" --wait=60 bash "$PROJECT_DIR/examples/slurm/rank.sh" "$PYTHON" "$PROJECT_DIR/tools/preflight.py" \
    --hosts "$(IFS=,; echo "${HOSTS[*]}")" --output "$LOG_DIR/preflight.json" --folder "$WORK_DIR" --min-free-gib "$MIN_FREE_GIB" \
    --min-bandwidth-gb-s "$MIN_BANDWIDTH_GB_S" --max-clock-skew-s "$MAX_CLOCK_SKEW_S" &
STEP_PID=$!
wait_for_step || status=$?
if ((SAVE_AND_STOP)); then
    restart_or_end 3
elif ((status)); then
    say "preflight failed with status $status"
    bad_nodes=""
    if [[ -s "$LOG_DIR/preflight.json.bad_nodes" ]]; then bad_nodes="$(cat "$LOG_DIR/preflight.json.bad_nodes")"; fi
    restart_or_end "$status" "$bad_nodes"
fi

if ((SAVE_AND_STOP)); then restart_or_end 3; fi
say "training"
RANK_0_LOG="$LOG_DIR/rank-0000.log"
touch "$RANK_0_LOG"
RANK_0_START=$(($(stat --format=%s "$RANK_0_LOG") + 1))
MASTER_PORT="$(free_port)" # that of the preflight may still be in use
# --wait: once a rank has ended, the others have this long to end too (after a save, ranks still close their logs); then they are killed.
"${ON_RANKS[@]}" --wait=60 --output="$LOG_DIR/rank-%4t.log" \
    bash "$PROJECT_DIR/examples/slurm/rank.sh" "$PYTHON" "$PROJECT_DIR/tools/train.py" "${OPTIONS[@]}" &
STEP_PID=$!
# Show rank 0's log on the console, from the beginning of this attempt.
tail --bytes="+$RANK_0_START" --pid="$STEP_PID" --follow "$RANK_0_LOG" &
TAIL_PID=$!
if ((SAVE_AND_STOP)); then kill -USR1 "$STEP_PID" || true; fi # the signal came between the two steps
status=0
wait_for_step || status=$?
wait "$TAIL_PID" || true

status="$(verdict "$status")"
say "the trainer ended with status $status"
case "$status" in
    0 | 2 | 4 | 6 | 7) exit "$status" ;;
    *) restart_or_end "$status" ;;
esac
