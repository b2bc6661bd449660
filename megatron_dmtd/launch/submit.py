"""Ask Slurm whether it would accept a job, and submit it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.launch.job import Job
from megatron_dmtd.launch.site import Site

LOGS = "slurm-logs"
_SLURM_ANSWERS_S = 60.0


def require_acceptance(job: Job) -> str:
    """Slurm's answer to a test submission, such as the expected start time. Raises `ConfigError` if Slurm would refuse it."""
    answer = _sbatch(["--test-only"], job.text)
    if answer.returncode != 0:
        raise ConfigError(
            found=f"Slurm: {answer.stderr.strip()}",
            required="a job that this cluster can run",
            remedy="correct the site file (account, partition, QOS) or the job's #SBATCH lines (nodes, time, memory)",
        )
    return answer.stderr.strip().removeprefix("sbatch: ")


def submit(job: Job, site: Site, *, dependency: str = "") -> str:
    """Submit the job, keep a copy of the script in the work folder, and return the job's number."""
    folder = Path(site.work_dir, LOGS)
    folder.mkdir(exist_ok=True)
    options = ["--parsable"]
    if dependency:
        # otherwise a job whose dependency failed stays in the queue forever
        options += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    answer = _sbatch(options, job.text)
    if answer.returncode != 0:
        raise ConfigError(
            found=f"Slurm: {answer.stderr.strip()}", required="a job that Slurm accepts", remedy="correct what the message names"
        )
    number = answer.stdout.strip().split(";")[0]
    write_atomically(folder / f"{job.name}-{number}.sbatch", job.text)
    return number


def _sbatch(options: list[str], text: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("sbatch") is None:
        raise CapabilityError(
            found="no sbatch", required="Slurm's commands", remedy="run this on a login node; --dry-run works anywhere"
        )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    started = time.monotonic()
    try:
        return subprocess.run(
            ["sbatch", *options], input=text, capture_output=True, encoding="utf-8", env=environment, timeout=_SLURM_ANSWERS_S
        )
    except subprocess.TimeoutExpired as error:
        raise CapabilityError(
            found=f"no answer from sbatch in {time.monotonic() - started:.0f} s",
            required="a controller that answers",
            remedy="try later; `scontrol ping` shows whether it is up",
        ) from error
