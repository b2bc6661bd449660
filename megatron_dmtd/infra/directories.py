"""Directories that are complete as soon as they have their names, and disappear atomically."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.disk import free_bytes, full_disk_behind

#: names of directories that are being removed
REMOVED_NAME = re.compile(r"\.removed-.*")
#: generous allowance for what a directory holds besides the announced bytes (configurations, code, a tokenizer)
SMALL_FILES_BYTES = 64 * 2**20


@contextlib.contextmanager
def built_aside(directory: Path) -> Iterator[Path]:
    """A new hidden directory next to `directory`, which takes that name if the block succeeds and is removed if it fails.

    Raises `OSError`, also if by then there is anything but an empty directory at `directory`.
    """
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    aside.mkdir(parents=True)
    try:
        yield aside
        os.replace(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def hide(directory: Path) -> Path:
    """Hide a directory, so that it does not look complete while its files are removed. Its hidden name. Raises `OSError`."""
    hidden = directory.with_name(f".removed-{directory.name}-{uuid.uuid4().hex[:8]}")
    os.rename(directory, hidden)
    return hidden


def remove(directory: Path) -> None:
    """Remove a directory. If the process is killed meanwhile, no part of it is left under its name. Raises `OSError`."""
    shutil.rmtree(hide(directory))


def refuse_used(directory: Path, *, error: type[DMTDError]) -> None:
    """Raise `error` if `directory` exists and is not an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise error(
            found=f"{directory} exists and is not an empty directory",
            required="a new or empty directory",
            remedy="choose another, or remove it yourself",
        )


def require_room(directory: Path, num_bytes: int, *, error: type[DMTDError]) -> None:
    """Raise `error` if the disk that will hold `directory` has less than `num_bytes` and some small files free."""
    found, existing = free_bytes(directory)
    if found < num_bytes + SMALL_FILES_BYTES:
        raise error(
            found=f"{found:,} bytes free on the disk of {existing}",
            required=f"{num_bytes + SMALL_FILES_BYTES:,} bytes for {directory}",
            remedy="free some, or write to another disk",
        )


@contextlib.contextmanager
def new_directory(directory: Path, *, error: type[DMTDError], num_bytes: int = 0) -> Iterator[Path]:
    """`built_aside` for the output of a command, with refusals of what the user has to fix.

    Raises `error` if `directory` exists and is not empty, cannot be created, or if the disk has no room for `num_bytes`, before
    or while the block runs.
    """
    refuse_used(directory, error=error)
    directory = directory.resolve()  # a symbolic link is kept; the directory that it points to is replaced
    require_room(directory, num_bytes, error=error)
    with contextlib.ExitStack() as held:
        try:
            aside = held.enter_context(built_aside(directory))
        except OSError as refused:
            raise error(
                found=f"{directory.parent}: {refused.strerror}",
                required="a directory that can be written to",
                remedy="choose another output",
            ) from refused
        try:
            yield aside
        except Exception as failure:
            full = full_disk_behind(failure)
            if full is None:
                raise
            raise error(
                found=f"{full.strerror} while writing {directory}",
                required="room for the whole directory; what was written has been removed",
                remedy="free some, or write to another disk",
            ) from failure
