# shellcheck shell=bash
# Sourced at the end of a training job: preflight, then tools/train.py as one process per rank, and what to do when it ends.
# OPTIONS holds the options of tools/train.py.
#
#   the trainer ends with                            the job
#   0 done                                           ends with 0
#   2 refused, 4 non-finite, 6 or 7 a full disk      ends with that status: a restart would not help
#   3 stopped by a signal, after a save              is requeued and goes on
#   anything else: a crash, a stall, a lost rank     is requeued and goes on from the newest checkpoint
#
# A job that restarts more than MAX_RESTARTS times without a newer checkpoint ends with the trainer's last status. After a node's
# death Slurm requeues the job itself (--requeue). A job that was cancelled (scancel JOB) is never requeued: see ending.sh.

# shellcheck source=environment.sh
source "$PROJECT_DIR/examples/slurm/environment.sh"

mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR="$(first_host)" # rank 0's node: ranks follow the order of the nodes
MASTER_PORT="$(free_port)"
EXIT_DIR="$LOG_DIR/exits-${SLURM_RESTART_COUNT:-0}"
export MASTER_ADDR MASTER_PORT EXIT_DIR
RESTARTS="$LOG_DIR/restarts.json"
SAVE_AND_STOP=0
STEP_PID=0

# Slurm sends USR1 some minutes before the time limit (--signal) and TERM when it ends the job: pass them on to the ranks. Only this
# shell gets USR1 otherwise. What becomes of the job is decided when the ranks have ended (ending.sh).
# shellcheck disable=SC2317 # the trap calls it
save_and_stop() {
    local state
    SAVE_AND_STOP=1
    if ((STEP_PID)); then kill -USR1 "$STEP_PID" 2>/dev/null || true; fi
    state="$(state_of_job)"
    say "asked to save and stop by $1; Slurm says of this job: $state"
    if is_stopped_by_slurm "$state"; then requeue_at_once; fi
}
trap 'save_and_stop USR1' USR1
trap 'save_and_stop TERM' TERM

restarts() {
    "${ONCE[@]}" "$PYTHON" -m megatron_dmtd.launch.restarts "$1" --state "$RESTARTS" --limit "$MAX_RESTARTS" "${@:2}" -- "${OPTIONS[@]}"
}

# shellcheck source=ending.sh
source "$PROJECT_DIR/examples/slurm/ending.sh"

# Whether the nodes can find each other, at once and by name: ranks would wait for minutes. A fault of all nodes ends the job; of
# some of them, it is requeued without them.
check_nodes() {
    local problems nodes strangers status=0
    problems="$("${ON_NODES[@]}" bash -c "$(<"$PROJECT_DIR/examples/slurm/node.sh")" node.sh "$MASTER_ADDR" "$PROJECT_DIR" \
        "${NETWORK_INTERFACE:-}")" || status=$?
    if ((status)); then
        say "nodes cannot be checked: srun ended with status $status"
        restart_or_end "$status"
    fi
    if [[ -z "$problems" ]]; then return; fi
    mapfile -t nodes < <(cut -d : -f 1 <<<"$problems" | sort -u)
    printf 'found: %s\n' "$(head -n 8 <<<"$problems")"
    echo "required: nodes that see this project and find each other"
    echo "remedy: RENDEZVOUS=address in the site file does without names of nodes, NETWORK_INTERFACE says which network to use;" \
        "or correct the site file or the nodes"
    # the first node often knows its own name when no other does
    strangers="$(grep -c "does not know the name" <<<"$problems" || true)"
    if ((${#nodes[@]} == SLURM_JOB_NUM_NODES || (strangers && strangers == SLURM_JOB_NUM_NODES - 1))); then exit 2; fi
    restart_or_end 8 "$(IFS=,; echo "${nodes[*]}")"
}

# The trainer's verdict from the ranks' statuses: what cannot be mended by a restart counts most, a killed rank least.
verdict() {
    local srun_status="$1" status statuses
    statuses="$(cat "$EXIT_DIR"/rank-* 2>/dev/null | sort -un | tr '\n' ' ')"
    for status in 2 4 6 7 5 1; do
        if [[ " $statuses" == *" $status "* ]]; then
            echo "$status"
            return
        fi
    done
    # Every rank that ended on its own did so after the save.
    if [[ "$statuses" == "3 " || "$statuses" == "0 3 " ]]; then
        echo 3
    else
        echo "$srun_status"
    fi
}

# Waits for the step that runs in the background. A trapped signal interrupts `wait`, which then has to be repeated.
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
say "nodes $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks, meeting at $MASTER_ADDR:$MASTER_PORT; logs of the ranks in $LOG_DIR"
status=0
restarts begin || status=$?
case "$status" in
    0) ;;
    7) exit "$(sed -nE 's/.*"last_status": ([0-9]+).*/\1/p' "$RESTARTS")" ;;
    # a signal ended the step, not the command itself
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
MASTER_PORT="$(free_port)" # the preflight's may linger
# --wait: when a rank ends, the others have this long to end too (ranks that saved still close their logs); then they are killed.
"${ON_RANKS[@]}" --wait=60 --output="$LOG_DIR/rank-%4t.log" \
    bash "$PROJECT_DIR/examples/slurm/rank.sh" "$PYTHON" "$PROJECT_DIR/tools/train.py" "${OPTIONS[@]}" &
STEP_PID=$!
# Rank 0 on the console, from where this attempt starts.
tail --bytes="+$RANK_0_START" --pid="$STEP_PID" --follow "$RANK_0_LOG" &
TAIL_PID=$!
if ((SAVE_AND_STOP)); then kill -USR1 "$STEP_PID" || true; fi # asked between the two steps
status=0
wait_for_step || status=$?
wait "$TAIL_PID" || true

status="$(verdict "$status")"
say "the trainer ended with status $status"
case "$status" in
    0 | 2 | 4 | 6 | 7) exit "$status" ;;
    *) restart_or_end "$status" ;;
esac
