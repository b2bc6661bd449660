"""Where a run keeps its checkpoints: `DIR/step_00000100/`, and `DIR/latest`, which names the newest complete one.

A step directory holds Megatron's `torch_dist` files, `config.yaml` and `checksums.sha256`. It is written under a hidden name and
renamed when it is complete, and hidden again before it is removed, so a name that matches is a checkpoint that loads. No torch.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from megatron_dmtd.errors import CheckpointError, Refusal
from megatron_dmtd.infra.checksums import CHECKSUMS_FILE, has_checksums
from megatron_dmtd.infra.directories import REMOVED_NAME, hide
from megatron_dmtd.infra.files import TEMPORARY_NAME, flush, write_atomically
from megatron_dmtd.weights.checkpoint_files import CONFIG_FILE, METADATA_FILE

LATEST_FILE = "latest"
#: where the recipes put the checkpoints of a run, below the folder of its logs
_BELOW_A_RUN = "checkpoints"
_STEP_NAME = re.compile(r"step_(\d{8,})")
#: directories that are being written or removed, and temporary files
_LEFTOVER_NAMES = (re.compile(r"\.partial-.*"), REMOVED_NAME, TEMPORARY_NAME)
#: a checkpoint whose bytes are not what was written
DAMAGED = Refusal(
    CheckpointError,
    required=f"a checkpoint whose files are all as {CHECKSUMS_FILE} records them",
    remedy="use another step: write its name into the run's `latest` file; or copy this one again from where it is whole",
)


def step_directory_name(step: int) -> str:
    """Name of the checkpoint after `step` finished steps."""
    return f"step_{step:08d}"


def partial_directory_name(step: int) -> str:
    """A new, unique name for that checkpoint while it is being written: what a killed run leaves behind does no harm."""
    return f".partial-{step_directory_name(step)}-{uuid.uuid4().hex[:8]}"


def publish(partial: Path, step: int) -> Path:
    """Give a complete directory its name, replacing an older one of this step, and make `latest` name it. Raises `OSError`."""
    run = partial.parent
    final = run / step_directory_name(step)
    flush(partial)
    replaced = hide(final) if final.exists() else None
    os.rename(partial, final)
    flush(run)
    write_atomically(run / LATEST_FILE, final.name + "\n")
    if replaced is not None:
        shutil.rmtree(replaced)
    return final


def remove_leftovers(run: Path) -> list[str]:
    """Remove what killed runs left half-written or half-removed; the names removed. Only while no other run uses the folder."""
    names = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
    leftovers = [run / name for name in names if any(pattern.fullmatch(name) for pattern in _LEFTOVER_NAMES)]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [path.name for path in leftovers]


def superfluous(run: Path, *, step: int, keep_last: int, keep_every: int) -> list[Path]:
    """The checkpoints up to `step` that a run need not keep. Later ones, if the run was set back, are not removed."""
    if keep_last == 0:
        return []
    older = [directory for directory in step_directories(run) if (step_of(directory) or 0) <= step]
    kept_for_ever = {d for d in older if keep_every and (step_of(d) or 0) % keep_every == 0}
    return [directory for directory in older[:-keep_last] if directory not in kept_for_ever]


def step_of(directory: Path) -> int | None:
    """The step of a checkpoint directory; None for any other name."""
    match = _STEP_NAME.fullmatch(directory.name)
    return int(match[1]) if match else None


def must_be_verified(directory: Path) -> bool:
    """Whether a checkpoint's bytes are to be compared: if it has checksums or, like every step of a run, should have them.

    Any other directory without checksums is an import of an earlier version, or a copy made without them.
    """
    return has_checksums(directory) or step_of(directory.resolve()) is not None


def step_directories(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not run.is_dir():
        return []
    found = [(step, path) for path in run.iterdir() if path.is_dir() and (step := step_of(path)) is not None]
    return [path for _, path in sorted(found) if (path / METADATA_FILE).is_file()]


def latest_directory(run: Path) -> Path | None:
    """The checkpoint that `latest` names, or None if the run has none.

    Raises `CheckpointError` if it names an incomplete one.
    """
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


def _nearby(directory: Path) -> str:
    """Advice about a directory that is not a checkpoint itself."""
    below = sorted(path.parent for path in directory.glob(f"*/{LATEST_FILE}"))
    if below:
        return "name " + " or ".join(map(str, below))
    if (directory / "config.json").is_file():
        return "this is a Hugging Face directory: make a checkpoint of it with tools/convert.py import"
    return "check the path, or wait for the run's first save"


def find_step_directory(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run directory, or of the `checkpoints` below it.

    Raises `CheckpointError` if there is none.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(found=f"no directory {path}", required="a checkpoint or a run directory", remedy="check the path")
    if (directory / METADATA_FILE).is_file() or (directory / CONFIG_FILE).is_file():
        _require_complete(directory)
        return directory
    latest = latest_directory(directory) or latest_directory(directory / _BELOW_A_RUN)
    if latest is None:
        raise CheckpointError(
            found=f"{path} with neither {METADATA_FILE} nor {LATEST_FILE}",
            required="a checkpoint directory, or a run's checkpoint.dir, which holds a `latest` file",
            remedy=_nearby(directory),
        )
    return latest
