"""One job at a time in a run's folder, and no stale lock. The other job is a process of its own, killed as a scheduler kills."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.errors import CheckpointError, ConfigError
from megatron_dmtd.training.checkpoints import paths, run_lock
from megatron_dmtd.training.checkpoints.run_lock import LOCK_FILE, locked, wait_until_free
from tests.support.checkpoints import PATIENCE_S, ROOT
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

_HOLDER = """
import sys, time
from megatron_dmtd.training.checkpoints.run_lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def start_holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts processes that hold a folder."""
    monkeypatch.setattr(run_lock, "_LINGER_S", 0.5)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    processes = []

    def start(folder: Path, *, seconds: float = 300, job: str = "") -> subprocess.Popen[str]:
        environment = os.environ | {"SLURM_JOB_ID": job, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _HOLDER, str(folder), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_folder_in_use_is_refused_by_the_name_of_its_owner_and_free_when_that_is_killed(start_holder, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "run"
    other = start_holder(folder, job="77")
    before = (folder / LOCK_FILE).read_text()
    with pytest.raises(ConfigError) as caught, locked(folder):
        pass
    assert f"{folder} is in use by process {other.pid} on {socket.gethostname()} since 20" in caught.value.found
    assert caught.value.found.endswith(", Slurm job 77")
    assert (folder / LOCK_FILE).read_text() == before
    other.send_signal(signal.SIGKILL)
    other.wait()
    with locked(folder):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    with locked(folder):
        pass


def test_a_requeued_job_waits_for_its_own_last_attempt_and_another_does_not(
    start_holder,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = time.monotonic()
    start_holder(tmp_path, seconds=2.5, job="7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(ConfigError, match=r"in use by .*Slurm job 7"), locked(tmp_path):
        pass
    assert time.monotonic() - started < 2
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with locked(tmp_path, lease_s=30):
        assert time.monotonic() - started >= 2


def test_a_process_forked_by_the_owner_holds_the_folder_until_it_ends(start_holder, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with locked(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
        child.start()
    try:
        with pytest.raises(ConfigError, match="in use"), locked(tmp_path):
            pass
    finally:
        child.kill()
        child.join()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"), locked(tmp_path / "file" / "run"):
        pass


def test_a_file_system_without_locks_is_used_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = errno.ENOLCK

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(found, os.strerror(found))

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked (No locks available)" in capsys.readouterr().err
    found = errno.EIO  # a disk that fails is none without locks
    with pytest.raises(CheckpointError, match="Input/output error"), locked(tmp_path):
        pass


def _alone(config: Config) -> None:
    os.setsid()
    os.environ["RANK"] = "0"
    run_job(config)


@pytest.mark.multiprocess
def test_a_second_job_touches_nothing_and_a_killed_one_stands_in_nobodys_way(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = with_settings(
        tiny_config(training={"steps": 100_000}, optimizer={"decay_steps": 10}),
        data={"train": (corpus[0],)},
        checkpoint={"dir": str(tmp_path / "checkpoints"), "interval": 0},
        logging={"dir": str(tmp_path / "log"), "progress": False},
    )
    log, half = tmp_path / "log" / "metrics.jsonl", tmp_path / "checkpoints" / paths.partial_directory_name(1)
    first: Any = multiprocessing.get_context("fork").Process(target=_alone, args=(config,))
    first.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not log.is_file() or log.read_bytes().count(b"\n") < 2:
            assert first.is_alive() and time.monotonic() < deadline, "no step was made"
            time.sleep(0.05)
        half.mkdir()  # as if the first were in the middle of a save
        last = with_settings(config, training={"steps": 2})
        with pytest.raises(AssertionError, match=rf"is in use by process {first.pid} on ") as caught:
            run_ranks(2, run_job, with_settings(last, training={"micro_batch_size": 1}))
        assert ConfigError.__name__ in str(caught.value)
        assert half.is_dir() and not (tmp_path / "log" / "metrics.superseded.jsonl").exists()
        assert first.is_alive()
        first.kill()
        first.join()
        assert run_ranks(1, run_job, last)[0][0] == "done"
        assert not half.exists() and paths.latest_directory(tmp_path / "checkpoints") is not None
    finally:
        first.kill()
        first.join()


def test_waiting_for_a_folder_names_its_owner_once_and_ends_when_it_is_free_or_time_is_up(tmp_path: Path) -> None:
    said: list[str] = []
    wait_until_free(tmp_path / "absent", timeout_s=60, waiting=said.append)
    with locked(tmp_path):
        wait_until_free(tmp_path, timeout_s=0.5, waiting=said.append)
        assert len(said) == 1 and f"process {os.getpid()} on" in said[0]
    wait_until_free(tmp_path, timeout_s=60, waiting=said.append)
    assert len(said) == 1
