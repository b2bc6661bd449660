"""Where a run keeps its checkpoints: `DIR/step_00000100/`, and `DIR/latest`, which names the newest complete one.

A step directory holds Megatron's `torch_dist` files and `config.yaml`. It is written under a hidden name and renamed when it is
complete, so a name that matches is a checkpoint that loads. No torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_dmtd.errors import CheckpointError

LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
#: Megatron writes this file last
METADATA_FILE = "metadata.json"
_STEP_NAME = re.compile(r"step_(\d{8,})")


def step_directory_name(step: int) -> str:
    """Name of the checkpoint after `step` finished steps."""
    return f"step_{step:08d}"


def partial_directory_name(step: int) -> str:
    """Name of that checkpoint while it is being written."""
    return f".partial-{step_directory_name(step)}"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file that is either the old one or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def step_of(directory: Path) -> int | None:
    """The step of a checkpoint directory; None for any other name."""
    match = _STEP_NAME.fullmatch(directory.name)
    return int(match[1]) if match else None


def step_directories(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not run.is_dir():
        return []
    found = [(step, path) for path in run.iterdir() if path.is_dir() and (step := step_of(path)) is not None]
    return [path for _, path in sorted(found) if (path / METADATA_FILE).is_file()]


def latest_directory(run: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where the run has none. Raises `CheckpointError` if it names one that is not whole."""
    pointer = run / LATEST_FILE
    if not pointer.is_file():
        return None
    directory = run / pointer.read_text().strip()
    _require_complete(directory)
    return directory


def _require_complete(directory: Path) -> None:
    missing = [name for name in (METADATA_FILE, CONFIG_FILE) if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            found=f"{directory} without {' and '.join(missing)}",
            required="a complete checkpoint: one directory of a run, with Megatron's files and config.yaml",
            remedy="name another checkpoint, or correct the run's `latest` file",
        )


def find_step_directory(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run directory. Raises `CheckpointError` if there is none."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(found=f"no directory {path}", required="a checkpoint or a run directory", remedy="check the path")
    if (directory / METADATA_FILE).is_file() or (directory / CONFIG_FILE).is_file():
        _require_complete(directory)
        return directory
    latest = latest_directory(directory)
    if latest is None:
        raise CheckpointError(
            found=f"{path} with neither {METADATA_FILE} nor {LATEST_FILE}",
            required="a checkpoint directory, or a run directory with a `latest` file",
            remedy="check the path, or wait for the run's first save",
        )
    return latest
