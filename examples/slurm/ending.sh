# shellcheck shell=bash
# Sourced by train.sh. Ends an attempt: requeues the job or lets it end, depending on the state in which Slurm has it.
#
#   state of the job                               the attempt
#   running                                        requeues the job if it may restart
#   requeued: by Slurm, after a node failure       ends; Slurm starts the job again
#             or a preemption
#   preempted, timeout: Slurm is stopping it       requeues the job
#   cancelled (scancel JOB)                        ends, and so does the job

# Converts a time printed by scontrol to seconds since 1970; 0 for None, Unknown and the like.
seconds_of() {
    date --date="$1" +%s 2>/dev/null || echo 0
}

# Whether a job was ended by a preemption. A preempted job may also be cancelled during its grace time; then it ended before the grace
# time was over.
is_preempted() {
    local text="$1" asked ended partition grace
    asked="$(seconds_of "$(field_of "$text" 'PreemptEligibleTime=[^ ]* PreemptTime')")"
    ended="$(seconds_of "$(field_of "$text" 'StartTime=[^ ]* EndTime')")"
    partition="$(field_of "$text" Partition)"
    ((asked && ended)) || return 1
    ((ended > asked + 2)) || return 0
    grace="$(scontrol show partition "$partition" | sed -nE 's/.*[[:space:]]GraceTime=([0-9]+).*/\1/p')"
    ((${grace:-0} && ended >= asked + grace))
}

# Extracts a field from the output of `scontrol show job`. The pattern starts at the beginning of the line, so that a job's name, which
# users choose, cannot be mistaken for a field.
field_of() {
    sed -nE "s/^ +$2=([^ ]*).*/\1/p" <<<"$1" | head -n 1
}

# Prints the state of this job: running, requeued, preempted, timeout or cancelled; unknown if Slurm does not answer within a minute.
state_of_job() {
    local text state reason count deadline=$((SECONDS + 60))
    until text="$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)"; do
        if ((SECONDS >= deadline)); then
            echo unknown
            return
        fi
        sleep 2
    done
    state="$(field_of "$text" JobState)"
    reason="$(field_of "$text" 'JobState=[^ ]* Reason')"
    count="$(field_of "$text" 'Requeue=[^ ]* Restarts')"
    if ((${count:-0} > ${SLURM_RESTART_COUNT:-0})); then
        echo requeued
    elif [[ "$state" == RUNNING ]]; then
        echo running
    elif [[ "$reason" == TimeLimit ]]; then
        echo timeout
    elif is_preempted "$text"; then
        echo preempted
    else
        echo cancelled
    fi
}

# Whether Slurm is stopping a job that should continue later.
is_stopped_by_slurm() {
    [[ "$1" == preempted || "$1" == timeout ]]
}

# Requeues a job that Slurm is stopping, without waiting for the ranks to save: Slurm kills them and this shell soon after TERM
# (KillWait).
requeue_at_once() {
    if scontrol requeue "$SLURM_JOB_ID"; then say "requeued"; fi
}

# Reports what happens to a job whose state is not for this script to change, and ends the attempt.
end_as_slurm_says() {
    local state="$1" status="$2"
    case "$state" in
        requeued)
            say "this job is back in the queue: it will resume from its newest checkpoint"
            exit 0
            ;;
        cancelled)
            say "this job was cancelled: it is not requeued"
            exit "$status"
            ;;
        *)
            say "Slurm's controller does not answer, so this job cannot be requeued: it ends with status $status"
            exit "$status"
            ;;
    esac
}

# Excludes nodes from a requeued job. This is possible only while the job is pending, that is, once this attempt has been torn down.
exclude() {
    local bad_nodes="$1"
    for _ in {1..50}; do
        if scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad_nodes" 2>/dev/null; then
            say "excluded $bad_nodes"
            return
        fi
        sleep 0.2
    done
    say "could not exclude $bad_nodes: the next preflight will find it again"
}

# Puts the job back into the queue under its own number, excluding the bad nodes, and ends this attempt.
requeue() {
    local state="$1" status="$2" bad_nodes="$3" only=()
    trap '' USR1 TERM # requeueing sends TERM to this shell, which has more to do
    # The job may be cancelled at any moment, and a plain `requeue` would bring it back. With Incomplete, Slurm leaves it cancelled.
    if [[ "$state" == running ]]; then only=(Incomplete); fi
    if ! scontrol requeue "${only[@]}" "$SLURM_JOB_ID"; then
        say "Slurm did not requeue this job, for the reason above: it ends with status $status"
        exit "$status"
    fi
    state="$(state_of_job)"
    if [[ "$state" != requeued ]]; then end_as_slurm_says "$state" "$status"; fi
    say "requeued"
    if [[ -n "$bad_nodes" ]]; then exclude "$bad_nodes"; fi
    exit 0
}

# Ends the attempt with a status; the job is requeued if it may restart.
restart_or_end() {
    local status="$1" bad_nodes="${2:-}" state answer=0
    state="$(state_of_job)"
    case "$state" in
        running)
            restarts again --status "$status" || answer=$?
            # 0 is yes. Other statuses come from srun itself, if the job is losing a node or being stopped; the next attempt counts.
            if ((answer == 2 || answer == 7)); then
                say "ends with status $status"
                exit "$status"
            fi
            ;;
        preempted | timeout) ;;
        *) end_as_slurm_says "$state" "$status" ;;
    esac
    requeue "$state" "$status" "$bad_nodes"
}
