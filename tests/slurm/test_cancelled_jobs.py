"""`scancel JOB` ends a training job for good in every phase; what Slurm stops for other reasons goes on."""

import time

import pytest

from tests.slurm.conftest import NUM_STEPS
from tests.support.slurm import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]


def wait_for_console(workplace, job_id: str, text: str) -> None:
    def is_there() -> bool:
        return any(text in path.read_text() for path in workplace.consoles() if path.name.endswith(f"-{job_id}.out"))

    wait_until(is_there, what=f"{text!r} on the console", timeout_s=60)


def wait_for_save(workplace, job_id: str) -> None:
    workplace.wait_for_step("run", 1)
    folder, deadline = workplace.folder / "run/checkpoints", time.monotonic() + 60
    while not any(folder.glob(".partial-*")):
        assert time.monotonic() < deadline, "no save was seen"


def wait_between_attempts(workplace, job_id: str) -> None:
    workplace.wait_for_step("run", 2)
    workplace.cluster.call("scancel", "--signal=USR1", "--batch", job_id)
    wait_until(lambda: workplace.cluster.job(job_id)["JobState"] == "PENDING", what="a pending job", timeout_s=60)


PHASES = {
    "start": lambda workplace, job_id: wait_for_console(workplace, job_id, "ranks, rendezvous at"),
    "preflight": lambda workplace, job_id: wait_for_console(workplace, job_id, "] preflight\n"),
    "training": lambda workplace, job_id: workplace.wait_for_step("run", 3),
    "save": wait_for_save,
    "between attempts": wait_between_attempts,
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_job_does_not_come_back(phase, workplace):
    job_id = workplace.train("run", steps=10_000, options=("--checkpoint.interval", "1", "--checkpoint.keep_last", "2"))
    PHASES[phase](workplace, job_id)
    workplace.cluster.call("scancel", job_id)
    record = workplace.finish(job_id, timeout_s=60)
    restarts = "1" if phase == "between attempts" else "0"
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", restarts), workplace.console(job_id)
    console = workplace.console(job_id)
    assert ("this job was cancelled: it is not requeued" in console) == (phase != "between attempts"), console
    time.sleep(3)  # a requeued job would be pending by now
    assert workplace.cluster.job(job_id)["JobState"] == "CANCELLED"
    assert workplace.cluster.call("squeue", "-h").stdout == ""


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("warned", "the trainer ended with status 3"),
        ("stopped", "state of the job: preempted"),
        pytest.param("requeued", "state of the job: requeued", marks=pytest.mark.slow),
    ],
)
def test_a_preempted_job_goes_on_when_there_is_room_again(partition, said, workplace):
    """`warned`: the ranks alone get TERM, long before the end. `stopped`: Slurm cancels. `requeued`: Slurm requeues at once."""
    job_id = workplace.train("run", sbatch=(f"--partition={partition}",))
    workplace.wait_for_step("run", 9)  # a checkpoint is there: the two harsh signals leave no time for another
    urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    workplace.cluster.call("sbatch", *urgent, cwd=workplace.folder)
    record = workplace.finish(job_id, timeout_s=200)
    console = workplace.console(job_id)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("COMPLETED", "0:0", "1"), console
    assert said in console and "resumed at step" in console
    assert list(workplace.losses("run")) == list(range(1, NUM_STEPS + 1))
