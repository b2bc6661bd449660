"""SHA-256 of every file of a checkpoint, in the format of `sha256sum`: `cd step_00000100 && sha256sum -c checksums.sha256`.

`dist_checkpointing` has no checksums: damage inside a tensor's bytes would load without a word. No torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training.paths import CHECKSUMS_FILE, write_durably

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>[^/\n]+)")


def sha256_of(path: Path) -> str:
    """Digest of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path, digests: Mapping[str, str] | None = None) -> None:
    """Record the digest of every file of `directory`; those given in `digests`, by name, are not computed again."""
    names = sorted(path.name for path in directory.iterdir() if path.name != CHECKSUMS_FILE)
    known = digests or {}
    lines = [f"{known.get(name) or sha256_of(directory / name)}  {name}\n" for name in names]
    write_durably(directory / CHECKSUMS_FILE, "".join(lines).encode())


def has_checksums(directory: Path) -> bool:
    """Whether the checkpoint's digests are recorded."""
    return (directory / CHECKSUMS_FILE).is_file()


def read_checksums(directory: Path) -> dict[str, str]:
    """Digest of each file, by name. Raises `CheckpointError` if the record is absent or no such record."""
    path = directory / CHECKSUMS_FILE
    if not path.is_file():
        raise _refusal(directory, [f"no {CHECKSUMS_FILE}"])
    matches = [_LINE.fullmatch(line) for line in path.read_bytes().decode(errors="replace").splitlines()]
    if not matches or None in matches:
        raise _refusal(directory, [f"{CHECKSUMS_FILE} itself is damaged"])
    return {match["name"]: match["digest"] for match in matches if match is not None}


def faults_of(directory: Path, names: Iterable[str], digests: Mapping[str, str]) -> list[str]:
    """What is wrong with the files `names`, one line each; nothing where all of them are as they were written."""
    faults = []
    for name in names:
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif sha256_of(path) != digests[name]:
            faults.append(f"{name} ({path.stat().st_size} bytes) is not what was written")
    return faults


def _refusal(directory: Path, faults: Iterable[str]) -> CheckpointError:
    return CheckpointError(
        found=f"{directory}: " + "; ".join(faults),
        required=f"a checkpoint whose files are all as {CHECKSUMS_FILE} records them",
        remedy="use another step: write its name into the run's `latest` file; or copy this one again from where it is whole",
    )


def refuse(directory: Path, faults: Iterable[str]) -> None:
    """Raise `CheckpointError` if there is any fault."""
    if faults := list(faults):
        raise _refusal(directory, faults)


def verify(directory: str | Path) -> None:
    """Read a whole checkpoint in this process. Raises `CheckpointError` naming each file that is missing or damaged."""
    directory = Path(directory)
    digests = read_checksums(directory)
    refuse(directory, faults_of(directory, sorted(digests), digests))
