"""examples/slurm/ending.sh without a cluster: what Slurm says about a job, and what the script makes of it.

The texts are `scontrol show job` of Slurm 22.05; tests/slurm/test_cancelled_jobs.py has the same cases on a real cluster.
"""

import os
import subprocess

import pytest

from tests.slurm.conftest import ROOT

_JOB = """\
JobId=7 JobName=JobState=RUNNING Reason=TimeLimit
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901747 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:03 TimeLimit=UNLIMITED TimeMin=N/A
   SubmitTime=2026-11-30T23:55:55 EligibleTime=2026-11-30T23:55:55
   AccrueTime=2026-11-30T23:55:55
   StartTime=2026-11-30T23:55:55 EndTime={end} Deadline=N/A
   PreemptEligibleTime=2026-11-30T23:55:55 PreemptTime={preempted}
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-30T23:55:55 Scheduler=Main
   Partition=low AllocNode:Sid=host:1 Restarts=9
   Comment=JobState=RUNNING Reason=TimeLimit Restarts=9
"""


_SCONTROL = """#!/bin/bash
cd {folder}
echo "$*" >> asked
[[ ! -f silent ]] || exit 1
case "$1 $2" in
    "show job") cat job.txt ;;
    "show partition") printf 'PartitionName=low\\n   Default=NO\\n   DisableRootJobs=NO GraceTime={grace} Hidden=NO\\n' ;;
    requeue*)
        if [[ -f after.txt ]]; then cp after.txt job.txt; fi
        [[ ! -f refuses ]]
        ;;
esac
"""
_HEAD = """
set -euo pipefail
say() {{ echo "$*"; }}
restarts() {{ return "${{COUNTED:-0}}"; }}
source {root}/examples/slurm/ending.sh
"""


def shell(folder, script: str, *, job: str, restarts: int = 0, grace: int = 0):
    """Run bash with ending.sh sourced, `say` and `restarts` as simple as can be, and a scontrol that notes what it was asked."""
    (folder / "job.txt").write_text(job)
    (folder / "asked").touch()
    (folder / "scontrol").write_text(_SCONTROL.format(folder=folder, grace=grace))
    (folder / "scontrol").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    return subprocess.run(
        ["bash", "-c", _HEAD.format(root=ROOT) + script],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=30,
    )


def job(*, state="COMPLETING", reason="None", restarts=0, end="2026-11-30T23:56:10", preempted="None") -> str:
    return _JOB.format(state=state, reason=reason, restarts=restarts, end=end, preempted=preempted)


RUNNING = job(state="RUNNING", end="Unknown")
REQUEUED = job(restarts=1, end="Unknown")
CANCELLED = job()
STATES = {
    "running": (RUNNING, {}, "running"),
    "running-again": (job(state="RUNNING", restarts=2, end="Unknown"), {"restarts": 2}, "running"),
    "leaving": (job(state="RUNNING", preempted="2026-11-30T23:56:00"), {"grace": 20}, "running"),
    "requeued": (REQUEUED, {}, "requeued"),
    "requeued-again": (job(restarts=3), {"restarts": 2}, "requeued"),
    "cancelled": (CANCELLED, {}, "cancelled"),
    "cancelled-again": (job(restarts=2), {"restarts": 2}, "cancelled"),
    "timeout": (job(reason="TimeLimit"), {}, "timeout"),
    "preempted": (job(preempted="2026-11-30T23:56:10"), {}, "preempted"),
    "preempted-after-grace": (job(preempted="2026-11-30T23:55:50"), {"grace": 20}, "preempted"),
    "cancelled-in-grace": (job(preempted="2026-11-30T23:56:00"), {"grace": 20}, "cancelled"),
    "cancelled-in-unknown-grace": (job(preempted="2026-11-30T23:56:00"), {"grace": 0}, "cancelled"),
}


@pytest.mark.parametrize(("text", "options", "state"), STATES.values(), ids=STATES)
def test_the_state_of_a_job_is_what_slurm_says(text, options, state, tmp_path):
    result = shell(tmp_path, "state_of_job", job=text, **options)
    assert (result.stdout, result.stderr, result.returncode) == (f"{state}\n", "", 0)


def asked(folder) -> list[str]:
    return [line for line in (folder / "asked").read_text().splitlines() if not line.startswith("show")]


def test_a_cancelled_job_ends_for_good_with_the_status_of_its_attempt(tmp_path):
    result = shell(tmp_path, "restart_or_end 3", job=CANCELLED)
    assert (result.stdout, result.returncode) == ("this job was cancelled: it is not requeued\n", 3)
    assert asked(tmp_path) == []


def test_a_job_that_slurm_has_requeued_is_left_to_it(tmp_path):
    result = shell(tmp_path, "restart_or_end 1", job=REQUEUED)
    assert (result.stdout, result.returncode) == (
        "this job is back in the queue: it will resume from its newest checkpoint\n",
        0,
    )
    assert asked(tmp_path) == []


def test_a_running_job_is_requeued_away_from_bad_nodes(tmp_path):
    (tmp_path / "after.txt").write_text(REQUEUED)
    result = shell(tmp_path, "restart_or_end 8 node[2-3]", job=RUNNING)
    assert (result.stdout, result.returncode) == ("requeued\nexcluded node[2-3]\n", 0)
    assert asked(tmp_path) == ["requeue Incomplete 7", "update JobId=7 ExcNodeList=node[2-3]"]


def test_a_job_cancelled_just_before_it_is_requeued_stays_cancelled(tmp_path):
    """`requeue Incomplete` leaves it alone, and says nothing."""
    (tmp_path / "after.txt").write_text(CANCELLED)
    result = shell(tmp_path, "restart_or_end 3", job=RUNNING)
    assert (result.stdout, result.returncode) == ("this job was cancelled: it is not requeued\n", 3)
    assert asked(tmp_path) == ["requeue Incomplete 7"]


@pytest.mark.parametrize("text", [job(reason="TimeLimit"), job(preempted="2026-11-30T23:56:10")], ids=["timeout", "preempted"])
def test_a_job_that_slurm_stops_for_want_of_time_or_room_is_requeued(text, tmp_path):
    (tmp_path / "after.txt").write_text(REQUEUED)
    result = shell(tmp_path, "restart_or_end 3", job=text)
    assert (result.stdout, result.returncode) == ("requeued\n", 0)
    assert asked(tmp_path) == ["requeue 7"]


@pytest.mark.parametrize(
    ("text", "is_requeued"), [(job(reason="TimeLimit"), True), (CANCELLED, False), (RUNNING, False), (REQUEUED, False)], ids=str
)
def test_only_what_slurm_stops_is_requeued_while_ranks_save(text, is_requeued, tmp_path):
    shell(tmp_path, 'if is_stopped_by_slurm "$(state_of_job)"; then requeue_at_once; fi', job=text)
    assert asked(tmp_path) == (["requeue 7"] if is_requeued else [])


def test_a_job_that_may_not_be_requeued_ends_with_its_status(tmp_path):
    (tmp_path / "refuses").touch()
    result = shell(tmp_path, "restart_or_end 5", job=RUNNING)
    assert (result.stdout, result.returncode) == (
        "Slurm did not requeue this job, for the reason above: it ends with status 5\n",
        5,
    )


def test_a_job_out_of_restarts_ends_with_its_status(tmp_path):
    result = shell(tmp_path, "COUNTED=7; restart_or_end 5", job=RUNNING)
    assert (result.stdout, result.returncode, asked(tmp_path)) == ("ends with status 5\n", 5, [])


def test_a_controller_that_does_not_answer_is_asked_again_and_then_given_up(tmp_path):
    (tmp_path / "silent").touch()
    result = shell(tmp_path, "sleep() { SECONDS=$((SECONDS + 30)); }; restart_or_end 3", job=RUNNING)
    assert (result.returncode, result.stdout) == (
        3,
        "Slurm's controller does not answer, so this job cannot be requeued: it ends with status 3\n",
    )
    assert (tmp_path / "asked").read_text().count("show job 7") == 3
