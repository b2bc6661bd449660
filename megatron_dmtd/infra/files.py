"""Files that are replaced atomically, and on the disk when a call returns. Everything raises `OSError`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

#: names of the temporary files below, for removing what a killed process left
TEMPORARY_NAME = re.compile(r"\..*\.tmp")


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder. The file that the block writes there replaces `path`, unless the block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file atomically: whatever happens, it is either the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())
