"""A lock between processes, on a file.

The lock is the kernel's (`flock`), so there are no stale locks: a process that is killed, or whose node dies, loses it.
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
    """A file to lock, created if necessary. Leaving the block, or `close`, releases the lock."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if the file cannot be opened."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def try_acquire(self) -> bool:
        """Whether this process now has the lock. Without support for locks: true, with a warning. Raises `OSError`."""
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
        """Wait for the lock. Raises `OSError` if locks are not supported."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def read_note(self) -> bytes:
        """The note that the owner wrote; empty if it has not done so yet. It remains after the lock is released."""
        return os.pread(self._descriptor, _NOTE_BYTES, 0)

    def write_note(self, note: bytes) -> None:
        """Write down who has the lock. On a full disk only the note is missing; the lock is held."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, note, 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
