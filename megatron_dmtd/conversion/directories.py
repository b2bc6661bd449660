"""A directory that appears complete or not at all, and room on the disk for it."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dmtd.errors import ConversionError

#: Configurations, code and tokenizer beside the weights, in bytes: generous.
SMALL_FILES_BYTES = 64 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_used(directory: Path) -> None:
    """Raise `ConversionError` if `directory` exists and is not an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConversionError(
            found=f"{directory} exists and is not an empty directory",
            required="a new or empty directory",
            remedy="choose another, or remove it yourself",
        )


def require_room(directory: Path, num_bytes: int) -> None:
    """Raise `ConversionError` if the disk that will hold `directory` has less than `num_bytes` and some small files free."""
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < num_bytes + SMALL_FILES_BYTES:
        raise ConversionError(
            found=f"{free_bytes:,} bytes free on the disk of {existing}",
            required=f"{num_bytes + SMALL_FILES_BYTES:,} bytes for {directory}",
            remedy="free some, or write to another disk",
        )


def _disk_error(error: BaseException | None) -> OSError | None:
    """The full disk behind `error`: libraries that write through a stream raise errors of their own on top of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def built_aside(directory: Path, *, num_bytes: int = 0) -> Iterator[Path]:
    """A new directory beside `directory`, which takes its place when the block ends well and is removed when it does not.

    Raises `ConversionError` if `directory` exists and is not empty, or if the disk has no room for `num_bytes`, before or while
    the block runs.
    """
    refuse_used(directory)
    directory = directory.resolve()  # a symbolic link stays, and what it names takes the place
    require_room(directory, num_bytes)
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ConversionError(
            found=f"{aside.parent}: {error.strerror}",
            required="a directory that can be written to",
            remedy="choose another output",
        ) from error
    try:
        yield aside
        os.replace(aside, directory)  # an empty directory may stand there
    except Exception as error:
        full = _disk_error(error)
        if full is None:
            raise
        raise ConversionError(
            found=f"{full.strerror} while writing {directory}",
            required="room for the whole directory; nothing of it was kept",
            remedy="free some, or write to another disk",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
