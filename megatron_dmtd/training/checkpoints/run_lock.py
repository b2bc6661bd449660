"""One job at a time in a run's folder: rank 0 holds `run.lock` there for as long as its process lives.

A second job would remove the first one's half-written save, replace its checkpoints and truncate its log. `infra/locks.py` says
on which file systems locks work. The text in the file only says who has the lock, and is left behind.

An NFS server releases a dead node's lock when its lease ends (NFS 4: 90 s by default); a requeue of the same Slurm job waits for
this. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from megatron_dmtd.errors import CheckpointError, ConfigError, Refusal
from megatron_dmtd.infra.disk import disk_errors
from megatron_dmtd.infra.json_files import parse_object
from megatron_dmtd.infra.locks import FileLock

LOCK_FILE = "run.lock"
#: seconds that a job which has just ended may need to exit: its writing processes hold the lock too, and die with it
_LINGER_S = 5.0
#: seconds after which a file server has released the lock of a dead node
LEASE_S = 150.0
_POLL_S = 0.2
_UNUSABLE = Refusal(
    CheckpointError, required="a folder that can be written to", remedy="change its permissions, or choose another folder"
)


def _own_line() -> str:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
    }
    return json.dumps(owner) + "\n"


def _owner_of(lock: FileLock) -> dict[str, object]:
    """What the owner wrote about itself; empty if it has not done so yet, or the text is cut off."""
    try:
        return parse_object(lock.read_note())
    except ValueError:
        return {}


def _in_words(owner: dict[str, object]) -> str:
    if not owner:
        return "a process that has not said which"
    job = f", Slurm job {owner['slurm_job']}" if owner.get("slurm_job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}{job}"


def _is_of_this_job(owner: dict[str, object]) -> bool:
    job = os.environ.get("SLURM_JOB_ID", "")
    return bool(job) and owner.get("slurm_job") == job


def _acquire(lock: FileLock, folder: Path, *, lease_s: float) -> None:
    started = time.monotonic()
    while not lock.try_acquire():
        owner = _owner_of(lock)
        if time.monotonic() - started > (max(lease_s, _LINGER_S) if _is_of_this_job(owner) else _LINGER_S):
            raise ConfigError(
                found=f"{folder} is in use by {_in_words(owner)}",
                required="a folder that no other job writes to",
                remedy="wait for that job or end it, or choose another folder; if its node is dead, its file server has not "
                "noticed yet: try again in some minutes",
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def locked(folder: str | Path, *, lease_s: float = LEASE_S) -> Iterator[None]:
    """Lock a run's folder, creating it if necessary. Processes forked meanwhile hold the lock too, until they end.

    `lease_s`: seconds to wait for an earlier attempt of the same Slurm job to lose the lock.

    Raises `ConfigError` if another job has it, `CheckpointError` if it cannot be written to.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as held:
        with disk_errors(_UNUSABLE, found=str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(FileLock(folder / LOCK_FILE))
            _acquire(lock, folder, lease_s=lease_s)
        lock.write_note(_own_line().encode())
        yield


def wait_until_free(folder: str | Path, *, timeout_s: float, waiting: Callable[[str], None]) -> None:
    """Wait until no job has a run's folder, or for `timeout_s`. If one has it, `waiting` gets the owner in words, once."""
    path = Path(folder) / LOCK_FILE
    if not path.is_file():
        return
    with FileLock(path) as lock:
        deadline, is_said = time.monotonic() + timeout_s, False
        while not lock.try_acquire() and time.monotonic() < deadline:
            if not is_said:
                waiting(_in_words(_owner_of(lock)))
            is_said = True
            time.sleep(_POLL_S)
