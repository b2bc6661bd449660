"""Errors of disks: full ones, and places that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Container, Iterator
from pathlib import Path

from megatron_dmtd.errors import Refusal

#: errors of an exhausted disk, quota or file size limit
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: these, and errors of places where the user may not write
UNWRITABLE = FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


def full_disk_behind(error: BaseException | None) -> OSError | None:
    """The full disk that caused `error`, if any: libraries that write through a stream raise their own errors on top of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def disk_errors(refusal: Refusal, *, found: str, only: Container[int] | None = None) -> Iterator[None]:
    """Raise `refusal` in place of an `OSError` of the block, with `found` before the system's message.

    `only`: the error numbers that the user can fix, such as `FULL`; others pass unchanged. None: all of them.
    """
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        raise refusal(f"{found}: {error.strerror or error}") from error


def free_bytes(path: Path) -> tuple[int, Path]:
    """Bytes free on the disk that holds, or will hold, `path`, and the nearest folder that exists."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free, existing
