import errno
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dmtd.infra.locks import FileLock
from tests.support.checkpoints import ROOT

_HOLDER = """
import sys, time
from pathlib import Path
from megatron_dmtd.infra.locks import FileLock
with FileLock(Path(sys.argv[1])) as lock:
    print(lock.try_acquire(), flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    return process


def test_a_lock_is_held_until_its_process_is_killed(tmp_path: Path) -> None:
    other = holder(tmp_path / "lock", 300)
    try:
        with FileLock(tmp_path / "lock") as lock:
            assert not lock.try_acquire()
            other.kill()
            other.wait()
            assert lock.try_acquire()
    finally:
        other.kill()
        other.communicate()


def test_waiting_ends_when_the_owner_does(tmp_path: Path) -> None:
    started = time.monotonic()
    other = holder(tmp_path / "lock", 1.0)
    with FileLock(tmp_path / "lock") as lock:
        lock.acquire()
        assert time.monotonic() - started >= 1.0
    other.communicate()


def test_a_forked_process_holds_the_lock_too(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        assert lock.try_acquire()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
        child.start()
    try:
        with FileLock(tmp_path / "lock") as lock:
            assert not lock.try_acquire()
            child.kill()
            child.join()
            assert lock.try_acquire()
    finally:
        child.kill()
        child.join()


def test_a_note_stays_when_its_owner_has_gone_and_is_replaced_whole(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        assert lock.read_note() == b""
        lock.write_note(b"a long note")
    with FileLock(tmp_path / "lock") as lock:
        assert lock.read_note() == b"a long note"
        lock.write_note(b"short")
        assert lock.read_note() == b"short"


def test_a_note_that_a_full_disk_does_not_take_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")
    with FileLock(tmp_path / "lock") as lock:
        lock.write_note(b"note")


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = errno.ENOLCK

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with FileLock(tmp_path / "lock") as lock:
        assert lock.try_acquire()
        assert f"{tmp_path} cannot be locked (No locks available)" in capsys.readouterr().err
        number = errno.EIO  # a disk that fails is not one without locks
        with pytest.raises(OSError, match="Input/output error"):
            lock.try_acquire()
        number = errno.EACCES  # how some servers say that another has it
        assert not lock.try_acquire()
