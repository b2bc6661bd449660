"""A real cluster of four nodes, a site file for it, and jobs submitted as users submit them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dmtd.training.log import METRICS_FILE, read_metrics
from tests.support.slurm import Cluster, missing_programs, running_cluster, wait_until
from tests.support.tiny import write_corpus

ROOT = Path(__file__).parents[2]
SITE_FILE = ROOT / "examples" / "slurm" / "site.env"
#: the quickstart's model and recipe, with short rows and few of them
SMALL_SETTINGS = {
    "model.vocab_size": "2048",
    "cycle.mask_token_id": "2000",
    "data.train": "[data/train]",
    "data.valid": "[]",
    "data.tokenizer": "",
    "data.seq_length": "64",
    "training.micro_batch_size": "1",
    "training.global_batch_size": "4",
    "checkpoint.init_from": "",
    "checkpoint.interval": "8",
    "checkpoint.keep_last": "0",
    "optimizer.warmup_steps": "2",
}
SMALL = [word for name, value in SMALL_SETTINGS.items() for word in (f"--{name}", value)]
NUM_STEPS = 24


def site_text(work: Path, **changes: object) -> str:
    """examples/slurm/site.env with the settings of the test's cluster."""
    values = {
        "VENV": sys.prefix,
        "PROJECT_DIR": ROOT,
        "WORK_DIR": work,
        "GPU_PARTITION": "main",
        "CPU_PARTITION": "main",
        "CPUS_PER_RANK": 1,
        "MIN_FREE_GIB": 0.01,
        **changes,
    }
    lines = []
    for line in SITE_FILE.read_text().splitlines():
        name = line.split("=")[0]
        lines.append(f"{name}={values.pop(name)}" if name in values else line)
    assert not values, f"no such settings: {values}"
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes: two for a job, and others to take their places."""
    if missing := missing_programs():
        reason = f"a Slurm cluster needs {', '.join(missing)} (docs/slurm.md says how to install it)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with running_cluster(tmp_path_factory.mktemp("slurm") / "lab", num_nodes=4) as running:
        yield running


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A work folder on the cluster, with a small corpus and a site file."""

    cluster: Cluster
    folder: Path

    def launch(self, script: str, *arguments: str, check: bool = True) -> str:
        """`tools/launch.py examples/slurm/SCRIPT ARGUMENTS`; the number of the job."""
        command = [
            sys.executable,
            "tools/launch.py",
            str(ROOT / "examples" / "slurm" / script),
            "--site",
            str(self.folder / "site.env"),
            *arguments,
        ]
        result = self.cluster.call(*command, cwd=ROOT, check=check, PYTHONPATH=str(ROOT))
        return result.stdout.strip() if check else result.stderr

    def train(
        self,
        run: str,
        *,
        steps: int = NUM_STEPS,
        sbatch: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        launch: tuple[str, ...] = (),
    ) -> str:
        """Submit the CPU example on two nodes, as a run of its own."""
        folders = ["--checkpoint.dir", f"{run}/checkpoints", "--logging.dir", run, "--training.steps", str(steps)]
        arguments = [f"--sbatch={option}" for option in ("--cpus-per-task=1", *sbatch)]
        return self.launch("train-cpu.sbatch", *arguments, *launch, "--", *SMALL, *folders, *options)

    def log_dir(self, job_id: str) -> Path:
        """The job's logs."""
        (folder,) = [
            path for path in (self.folder / "slurm-logs").iterdir() if path.name.endswith(f"-{job_id}") and path.is_dir()
        ]
        return folder

    def console(self, job_id: str) -> str:
        """What the job printed, in all its attempts."""
        (path,) = (self.folder / "slurm-logs").glob(f"*-{job_id}.out")
        return path.read_text()

    def consoles(self) -> list[Path]:
        """For messages of failures."""
        return sorted((self.folder / "slurm-logs").glob("*.out"))

    def losses(self, run: str) -> dict[int, float]:
        """Loss by step, as the run's log has it in the end."""
        return {record["step"]: record["loss"] for record in read_metrics(self.folder / run / METRICS_FILE) if "loss" in record}

    def wait_for_step(self, run: str, step: int) -> None:
        """Until the run has logged a step."""
        path = self.folder / run / METRICS_FILE
        wait_until(
            lambda: path.is_file() and any(record["step"] >= step and "loss" in record for record in read_metrics(path)),
            timeout_s=120,
            what=f"step {step} of {run}",
            explain=lambda: "\n".join(console.read_text()[-3000:] for console in self.consoles()),
        )

    def finish(self, job_id: str, *, timeout_s: float = 150) -> dict[str, str]:
        """The job's record once it has ended."""
        return self.cluster.wait_for_job(job_id, timeout_s=timeout_s, logs=self.consoles())


@pytest.fixture
def workplace(cluster: Cluster, tmp_path: Path) -> Workplace:
    """A fresh work folder; all nodes up."""
    cluster.revive()
    write_corpus_in(tmp_path)
    (tmp_path / "site.env").write_text(site_text(tmp_path))
    return Workplace(cluster=cluster, folder=tmp_path)


def write_corpus_in(folder: Path) -> None:
    """`data/train` below a work folder."""
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    (folder / "data").mkdir()
    write_corpus(folder / "data" / "train", num_documents=60)
