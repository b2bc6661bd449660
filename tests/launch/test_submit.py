"""Submission, with a command of this test's in place of Slurm's."""

import dataclasses
import os
from types import SimpleNamespace

import pytest

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.launch import submit as module
from megatron_dmtd.launch.submit import require_acceptance, submit


@dataclasses.dataclass(frozen=True)
class Job:
    name: str = "train"
    text: str = "#!/bin/bash\necho é\n"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Installs a `sbatch` that notes how it was called, and then does as told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(script: str):
        (folder / "sbatch").write_text(
            f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/arguments\ncat > {tmp_path}/input\n'
            f"env | grep ^SBATCH > {tmp_path}/environment\n{script}\n"
        )
        (folder / "sbatch").chmod(0o755)
        return tmp_path

    return install


@pytest.fixture
def site(tmp_path):
    return SimpleNamespace(work_dir=str(tmp_path))


def test_a_submitted_job_is_kept_as_it_was_under_its_number(slurm, site, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "another one than the script's")
    folder = slurm("echo '4711;cluster'")
    assert submit(Job(), site, dependency="afterok:12") == "4711"
    arguments = (folder / "arguments").read_text().split()
    assert arguments == ["--parsable", "--dependency=afterok:12", "--kill-on-invalid-dep=yes"]
    assert (folder / "input").read_text() == Job().text
    assert [path.name for path in (folder / "slurm-logs").iterdir()] == ["train-4711.sbatch"]
    assert (folder / "slurm-logs" / "train-4711.sbatch").read_text() == Job().text
    assert (folder / "environment").read_text() == "", "variables of sbatch would overrule the script"
    submit(Job(), site)
    assert (folder / "arguments").read_text().split() == ["--parsable"]


def test_a_job_that_slurm_refuses_leaves_no_copy(slurm, site):
    folder = slurm("echo 'invalid partition' >&2; exit 1")
    with pytest.raises(ConfigError, match="Slurm: invalid partition"):
        submit(Job(), site)
    assert list((folder / "slurm-logs").iterdir()) == []


def test_acceptance_is_what_slurm_says_without_running_the_job(slurm):
    folder = slurm("echo 'sbatch: Job 7 to start at noon' >&2")
    assert require_acceptance(Job()) == "Job 7 to start at noon"
    assert (folder / "arguments").read_text().split() == ["--test-only"]
    slurm("echo 'sbatch: error: too many nodes' >&2; exit 1")
    with pytest.raises(ConfigError, match="too many nodes"):
        require_acceptance(Job())


def test_a_host_without_slurm_and_a_controller_without_answer_are_named(slurm, monkeypatch):
    slurm("exec sleep 30")
    monkeypatch.setattr(module, "_SLURM_ANSWERS_S", 0.3)
    with pytest.raises(CapabilityError, match="no answer from sbatch"):
        require_acceptance(Job())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CapabilityError, match="no sbatch"):
        require_acceptance(Job())
