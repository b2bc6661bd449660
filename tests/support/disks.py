"""Small file systems of their own, which fill up or refuse."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs. Needs root; where root may not mount either, the test fails by name instead of passing."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0 and os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    assert mounted.returncode == 0, f"root cannot mount a tmpfs here: {mounted.stderr}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
