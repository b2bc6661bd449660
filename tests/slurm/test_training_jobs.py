"""Training as users submit it, on a real Slurm: same losses as torchrun, through signals, dead nodes and bad nodes."""

import os
import shlex
import subprocess
import sys

import pytest

from megatron_dmtd.training.checkpoints.paths import latest_directory
from megatron_dmtd.training.log import METRICS_FILE, RUN_ID_FILE, read_metrics
from tests.slurm.conftest import NUM_STEPS, ROOT, SMALL, write_corpus_in

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def losses_of_torchrun(tmp_path_factory):
    """Loss by step of the same run and layout, started by torchrun and never interrupted."""
    folder = tmp_path_factory.mktemp("torchrun")
    write_corpus_in(folder)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "tools/train.py"),
    ]
    recipe = ["--config", str(ROOT / "examples/quickstart/bidirectional-refresh.yaml"), "--parallel.pipeline", "2"]
    options = ["--checkpoint.dir", "run/checkpoints", "--logging.dir", "run", "--training.steps", str(NUM_STEPS)]
    result = subprocess.run(
        [*command, *recipe, *SMALL, *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = {record["step"]: record["loss"] for record in read_metrics(folder / "run" / METRICS_FILE) if "loss" in record}
    assert list(losses) == list(range(1, NUM_STEPS + 1)) and len(set(losses.values())) == NUM_STEPS
    return losses


def test_a_two_node_job_gives_the_losses_of_torchrun(workplace, losses_of_torchrun):
    job_id = workplace.train("run")
    record = workplace.finish(job_id)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("COMPLETED", "0:0", "0")
    assert workplace.losses("run") == losses_of_torchrun
    console = workplace.console(job_id)
    assert "preflight: passed" in console and "node1 - node2: " in console and "all-reduce over 2 ranks: " in console
    logs = workplace.log_dir(job_id)
    assert sorted(path.name for path in logs.glob("rank-*.log")) == ["rank-0000.log", "rank-0001.log"]
    assert "step 24/24" in console and "step 24/24" in (logs / "rank-0000.log").read_text()


def test_a_script_as_it_stands_may_be_given_to_sbatch(workplace, losses_of_torchrun):
    """Without tools/launch.py: from the checkout, with the site file in the environment and the partition as an option."""
    script = workplace.folder / "mine.sbatch"
    words = [*SMALL, "--checkpoint.dir", "run/checkpoints", "--logging.dir", "run", "--training.steps", str(NUM_STEPS)]
    text = (ROOT / "examples/slurm/train-cpu.sbatch").read_text()
    script.write_text(text.replace("\n)\n", f"\n    {shlex.join(words)}\n)\n"))
    output = workplace.folder / "console.out"
    options = ["--parsable", "--partition=main", "--cpus-per-task=1", f"--output={output}"]
    site = str(workplace.folder / "site.env")
    job_id = workplace.cluster.call("sbatch", *options, str(script), cwd=ROOT, SITE_FILE=site).stdout.strip()
    record = workplace.finish(job_id)
    assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0"), output.read_text()
    assert workplace.losses("run") == losses_of_torchrun
    assert (workplace.folder / f"slurm-logs/quickstart-{job_id}/rank-0001.log").is_file()


def test_a_signalled_job_saves_and_is_requeued_and_its_curve_is_that_of_an_uninterrupted_one(workplace, losses_of_torchrun):
    job_id = workplace.train("run", options=("--logging.wandb_project", "lab"))
    workplace.wait_for_step("run", 3)
    workplace.cluster.call("scancel", "--signal=USR1", "--batch", job_id)
    record = workplace.finish(job_id, timeout_s=200)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert workplace.losses("run") == losses_of_torchrun
    console = workplace.console(job_id)
    assert "asked to save and stop" in console and "the trainer ended with status 3" in console
    steps = [int(path.name.split("_")[1]) for path in (workplace.folder / "run/checkpoints").glob("step_*")]
    (stopped_at,) = set(steps) - {8, 16, 24}
    assert f"resumed at step {stopped_at}" in console
    # the same files went on, and the same wandb run: two stores, one for each attempt, of one id
    assert "step 1/24" in console and "step 24/24" in console
    run_id = (workplace.folder / "run" / RUN_ID_FILE).read_text().strip()
    stores = sorted(path.name for path in (workplace.folder / "run" / "wandb").glob("offline-run-*"))
    assert len(stores) == 2 and all(name.endswith(f"-{run_id}") for name in stores)


@pytest.mark.parametrize(
    "victim", ["the first node, which runs the batch script", pytest.param("the second node", marks=pytest.mark.slow)]
)
def test_a_job_that_loses_a_node_goes_on_elsewhere_to_the_same_curve(victim, workplace, losses_of_torchrun):
    job_id = workplace.train("run")
    workplace.wait_for_step("run", 10)
    first, second = workplace.cluster.nodes_of(job_id)
    workplace.cluster.kill_node(first if "first" in victim else second)
    record = workplace.finish(job_id, timeout_s=240)
    assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0")
    assert int(record["Restarts"]) >= 1
    assert workplace.cluster.nodes_of(job_id) != [first, second]
    assert workplace.losses("run") == losses_of_torchrun
    console = workplace.console(job_id)
    assert "resumed at step 8" in console
    # the batch script outlives the second node, and tells what Slurm does
    told = "requeued" in console or "this job is back in the queue" in console
    assert told == ("second" in victim) and "ends" not in console, console


def test_a_node_without_the_shared_folder_is_named_excluded_and_replaced(workplace):
    workplace.cluster.run_on("node2", "mount", "-t", "tmpfs", "none", str(workplace.folder))
    try:
        job_id = workplace.train("run", steps=4)  # Slurm takes the first nodes that are free
        record = workplace.finish(job_id, timeout_s=200)
    finally:
        workplace.cluster.run_on("node2", "umount", str(workplace.folder))
    console = workplace.console(job_id)
    assert "BAD NODE node2\n  found: the work folder here is not that of rank 0" in console
    assert "remedy: have the mount checked" in console
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("COMPLETED", "1", "node2")
    assert "node2" not in workplace.cluster.nodes_of(job_id)


def test_a_job_that_gets_nowhere_ends_with_the_status_of_its_last_attempt(workplace):
    site = workplace.folder / "site.env"
    site.write_text(site.read_text().replace("MAX_RESTARTS=3", "MAX_RESTARTS=0"))
    job_id = workplace.train("run", steps=10_000, options=("--checkpoint.interval", "0"))
    workplace.wait_for_step("run", 1)
    workplace.cluster.run_on("node2", "pkill", "--signal", "KILL", "--full", "tools/train.py.*--logging.dir run")
    record = workplace.finish(job_id)
    console = workplace.console(job_id)
    assert (record["JobState"], record["Restarts"]) == ("FAILED", "0")
    assert record["ExitCode"].split(":")[0] in ("1", "137"), console[-2000:]
    assert f"ends with status {record['ExitCode'].split(':')[0]}" in console
    assert "restarts without a checkpoint after step 0" in console and "MAX_RESTARTS" in console
    assert latest_directory(workplace.folder / "run/checkpoints") is None


def test_what_the_trainer_refuses_ends_the_job_with_its_status(workplace):
    """What only the job can see: a job that waits for others may find that they did not make its corpus."""
    (workplace.folder / "data" / "train.bin").unlink()
    record = workplace.finish(job_id := workplace.train("run", launch=("--dependency", "singleton")))
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "2:0", "0")
    assert "no file data/train.bin" in workplace.console(job_id)
