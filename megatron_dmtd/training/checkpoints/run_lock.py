"""One job at a time in a run's folder: rank 0 holds `run.lock` there for as long as its process lives.

A second job would remove the first one's half-written save, replace its checkpoints and cut its log. The lock is the kernel's
(`flock`), so nothing stale can stand in the way: whoever is killed, or whose node dies, loses it. The text in the file only says
who has it, and stays behind.

On NFS `flock` works between nodes since Linux 2.6.12: the server keeps it, and gives a dead node's lock up when its lease ends
(NFS 4: 90 s by default), for which a requeue of the same Slurm job waits. Lustre wants the mount option `flock`. A file system
that has no locks is used without one, and says so; one that keeps locks to the node (Lustre's `localflock`) protects from jobs on
the same node alone. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from megatron_dmtd.errors import CheckpointError, ConfigError

LOCK_FILE = "run.lock"
#: seconds that a job which has just ended may need to be gone: its writing processes hold the lock too, and die with it
_LINGER_S = 5.0
#: seconds after which a file server has given up the lock of a node that died
LEASE_S = 150.0
_POLL_S = 0.2
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


def _own_line() -> str:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
    }
    return json.dumps(owner) + "\n"


def _owner_of(descriptor: int) -> dict[str, object]:
    """What the owner wrote of itself; empty if it has not got that far, or was cut off."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_words(owner: dict[str, object]) -> str:
    if not owner:
        return "a process that has not said which"
    job = f", Slurm job {owner['slurm_job']}" if owner.get("slurm_job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}{job}"


def _unusable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        found=f"{folder}: {error.strerror}", required="a folder that can be written to", remedy="mend it, or choose another"
    )


def _try_lock(descriptor: int) -> bool:
    """Whether the lock is ours now. Raises `OSError` where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_of_this_job(owner: dict[str, object]) -> bool:
    job = os.environ.get("SLURM_JOB_ID", "")
    return bool(job) and owner.get("slurm_job") == job


def _acquire(descriptor: int, folder: Path, *, lease_s: float) -> None:
    started = time.monotonic()
    while not _try_lock(descriptor):
        owner = _owner_of(descriptor)
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
    """Hold a run's folder, making it if need be. Processes forked meanwhile hold it too, until they end.

    `lease_s`: seconds to wait for an earlier attempt of the same Slurm job to lose it.

    Raises `ConfigError` if another job has it, `CheckpointError` if it cannot be written to.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        _take(descriptor, folder, lease_s=lease_s)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path, *, lease_s: float) -> None:
    try:
        _acquire(descriptor, folder, lease_s=lease_s)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _unusable(folder, error) from error
        print(f"{folder} cannot be locked ({error.strerror}): see to it that no other job uses it", file=sys.stderr)
        return
    with contextlib.suppress(OSError):  # a full disk: the lock holds, and only its owner's name is missing
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _own_line().encode(), 0)
