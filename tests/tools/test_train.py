"""`tools/train.py` as users and schedulers start it: signals, kills in the middle of a save, and its exit statuses.

Short cases run by default; the long ones are marked slow.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.infra import checksums
from megatron_dmtd.training import exit_codes
from megatron_dmtd.training.checkpoints import paths
from tests.support.checkpoints import ROOT, Job, common_of
from tests.support.jobs import lines_of
from tests.support.tiny import tiny_config, with_settings

pytestmark = pytest.mark.multiprocess


def _config(corpus: tuple[str, str], folder: Path, steps: int = 1000, **sections: Any) -> Config:
    config = with_settings(
        tiny_config(training={"steps": steps}, optimizer={"decay_steps": 10}),
        data={"train": (corpus[0],), "valid": (corpus[1],)},
        checkpoint={"dir": str(folder / "checkpoints"), "interval": 0},
        logging={"dir": str(folder / "log")},
    )
    return with_settings(config, **sections)


def _newest(config: Config) -> Path:
    directory = paths.latest_directory(Path(config.checkpoint.dir))
    assert directory is not None
    return directory


def _catches(process: subprocess.Popen[bytes], number: int) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def test_help_tells_the_exit_statuses() -> None:
    shown = subprocess.run(
        [sys.executable, "tools/train.py", "--help"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert shown.returncode == 0
    words = " ".join(shown.stdout.split())
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"{code} {meaning}" in words


def test_a_signal_to_one_rank_stops_both_with_status_3_and_another_start_goes_on(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path)
    with Job(config, tmp_path / "first", ranks=2) as job:
        job.wait_for(lambda: "step 2/" in job.output())
        job.send(signal.SIGUSR1, 1)
        assert job.wait() == [exit_codes.STOPPED] * 2, job.output()
    step = common_of(_newest(config))["progress"]["step"]
    assert step >= 2
    assert f"stopped by SIGUSR1 after step {step}; saved {_newest(config)}" in job.output(1)
    with Job(with_settings(config, training={"steps": step + 1}), tmp_path / "second", ranks=2) as job:
        assert job.wait() == [exit_codes.DONE] * 2, job.output()
    assert f"resumed at step {step}" in job.output()
    assert f"differs: training.steps = 1000 in the checkpoint, {step + 1} in this run (allowed" in job.output()
    trained = [line["step"] for line in lines_of(config) if "lr" in line]
    assert trained == list(range(1, step + 2))


def test_ctrl_c_saves_too_and_a_run_that_is_done_says_so(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path)
    with Job(config, tmp_path / "first") as job:
        job.wait_for(lambda: "step 2/" in job.output())
        job.send(signal.SIGINT, 0)
        assert job.wait() == [exit_codes.STOPPED], job.output()
    step = common_of(_newest(config))["progress"]["step"]
    assert "SIGINT: saves and stops after this step" in job.output() and "Traceback" not in job.output()
    with Job(with_settings(config, training={"steps": step}), tmp_path / "second") as job:
        assert job.wait() == [exit_codes.DONE], job.output()
    assert f"resumed at step {step}; nothing is left to do: training.steps = {step}\n" in job.output()


def test_a_signal_before_the_first_step_saves_too_and_a_damaged_checkpoint_is_refused(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    config = _config(corpus, tmp_path)
    with Job(config, tmp_path / "first") as job:
        job.wait_for(lambda: _catches(job.processes[0], signal.SIGTERM))
        job.send(signal.SIGTERM)
        assert job.wait() == [exit_codes.STOPPED], job.output()
    saved = _newest(config)
    assert saved.name == paths.step_directory_name(0)
    checksums.verify(saved, paths.DAMAGED)
    part = saved / "__0_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with Job(config, tmp_path / "second") as job:
        assert job.wait() == [exit_codes.REFUSED], job.output()
    assert "__0_0.distcp" in job.output() and "is not what was written" in job.output()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_signal_ends_every_rank_at_once(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path)
    with Job(config, tmp_path / "job", ranks=2) as job:
        job.wait_for(lambda: "step 1/" in job.output())
        job.send(signal.SIGSTOP, 1)  # so that rank 0 waits inside a collective and cannot stop by itself
        job.send(signal.SIGTERM, 0)
        time.sleep(3)
        job.send(signal.SIGUSR1, 0)
        assert job.processes[0].wait(timeout=10) == 128 + signal.SIGUSR1, job.output()
    assert paths.latest_directory(Path(config.checkpoint.dir)) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_torchrun_sees_the_status_and_the_save(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path)
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tools/train.py")
    with Job(config, tmp_path / "job", program=program) as job:
        job.wait_for(lambda: "step 2/" in job.output())
        workers = subprocess.run(["pgrep", "-P", str(job.processes[0].pid)], capture_output=True, text=True).stdout.split()
        assert len(workers) == 2
        subprocess.run(["kill", "-TERM", workers[1]], check=True)
        assert job.wait() == [1], job.output()
    assert f"exitcode  : {exit_codes.STOPPED}" in job.output(), "torchrun's own report"
    checksums.verify(_newest(config), paths.DAMAGED)
    with Job(config, tmp_path / "agent", program=program) as job:
        job.wait_for(lambda: "resumed at step" in job.output() and job.output().count("\nstep ") >= 1)
        before = _newest(config)
        job.send(signal.SIGTERM)  # to torchrun, which passes it on
        assert job.wait() != [0]
    assert _newest(config) != before
    checksums.verify(_newest(config), paths.DAMAGED)
