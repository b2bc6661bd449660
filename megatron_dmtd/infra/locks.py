"""A lock between processes, on a file.

The lock is the kernel's (`flock`), so nothing stale can stand in the way: whoever is killed, or whose node dies, loses it.
Processes forked by the owner hold it too, until they end. On NFS it works between nodes since Linux 2.6.12; Lustre needs the
mount option `flock`. A file system without locks is used unlocked, with a warning; one that keeps locks to the node (Lustre's
`localflock`) protects only from processes on the same node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_NOTE_BYTES = 4096


class FileLock:
    """One file to lock, made if it is not there. Leaving the block, or `close`, gives the lock up."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if the file cannot be opened."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def try_acquire(self) -> bool:
        """Whether the lock is ours now. Where there are no locks it is, with a warning. Raises `OSError` if the disk fails."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            words = f"{self.path.parent} cannot be locked ({error.strerror}): make sure that no other job uses it"
            print(words, file=sys.stderr)
        return True

    def acquire(self) -> None:
        """Wait for the lock. Raises `OSError` where there are no locks."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def read_note(self) -> bytes:
        """What the owner wrote of itself; empty if it has not got that far. It stays when the lock has gone."""
        return os.pread(self._descriptor, _NOTE_BYTES, 0)

    def write_note(self, note: bytes) -> None:
        """Say who has the lock. On a full disk the lock holds, and only the note is missing."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, note, 0)

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
