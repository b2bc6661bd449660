"""A directory that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dmtd.errors import ConversionError


def refuse_used(directory: Path) -> None:
    """Raise `ConversionError` if `directory` exists and is not an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConversionError(
            found=f"{directory} exists and is not an empty directory",
            required="a new or empty directory",
            remedy="choose another, or remove it yourself",
        )


@contextmanager
def built_aside(directory: Path) -> Iterator[Path]:
    """A new directory beside `directory`, which takes its place when the block ends well and is removed when it does not.

    Raises `ConversionError` if `directory` exists and is not empty.
    """
    refuse_used(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    aside.mkdir()
    try:
        yield aside
        os.replace(aside, directory)  # an empty directory may stand there
    finally:
        shutil.rmtree(aside, ignore_errors=True)
