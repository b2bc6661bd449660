"""SHA-256 of every file of a checkpoint, in the format of `sha256sum`: `cd step_00000100 && sha256sum -c checksums.sha256`.

`dist_checkpointing` has no checksums: damage inside a tensor's bytes would load without a word. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training.checkpoints.paths import CHECKSUMS_FILE, step_of, write_durably

#: names are relative to the checkpoint: nothing outside it is ever read
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>(?!\.\.?(/|$))[^/\n]+(/(?!\.\.?(/|$))[^/\n]+)*)")
_BLOCK_BYTES = 2**20
_MOST_THREADS = 8


def _no_report(num_bytes: int) -> None:
    """Nobody wants to know how far the reading has come."""


def sha256_of(path: Path, on_bytes: Callable[[int], None] = _no_report) -> str:
    """Digest of a file's bytes, in hexadecimal. `on_bytes` is told how many were read, block by block. Raises `OSError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            on_bytes(size)
    return digest.hexdigest()


def write_checksums(directory: Path, digests: Mapping[str, str] | None = None) -> None:
    """Record the digest of every file of `directory`; those given in `digests`, by name, are not computed again."""
    files = (path for path in directory.rglob("*") if path.is_file())
    names = sorted(path.relative_to(directory).as_posix() for path in files if path.name != CHECKSUMS_FILE)
    known = digests or {}
    lines = [f"{known.get(name) or sha256_of(directory / name)}  {name}\n" for name in names]
    write_durably(directory / CHECKSUMS_FILE, "".join(lines).encode())


def has_checksums(directory: Path) -> bool:
    """Whether the checkpoint's digests are recorded."""
    return (directory / CHECKSUMS_FILE).is_file()


def must_be_verified(directory: Path) -> bool:
    """Whether a checkpoint's bytes are to be compared: if it has checksums, and if it ought to, as every step of a run does.

    What stands elsewhere without any is an import of an earlier version, or a copy whose owner left them out.
    """
    return has_checksums(directory) or step_of(directory.resolve()) is not None


def num_bytes(directory: Path) -> int:
    """Size of all files that the checkpoint's record names and that exist."""
    paths = (directory / name for name in read_checksums(directory))
    return sum(path.stat().st_size for path in paths if path.is_file())


def read_checksums(directory: Path) -> dict[str, str]:
    """Digest of each file, by name. Raises `CheckpointError` if the record is absent or no such record."""
    path = directory / CHECKSUMS_FILE
    if not path.is_file():
        raise _refusal(directory, [f"no {CHECKSUMS_FILE}"])
    matches = [_LINE.fullmatch(line) for line in path.read_bytes().decode(errors="replace").splitlines()]
    if not matches or None in matches:
        raise _refusal(directory, [f"{CHECKSUMS_FILE} itself is damaged"])
    return {match["name"]: match["digest"] for match in matches if match is not None}


def _fault_of(path: Path, name: str, digest: str, on_bytes: Callable[[int], None]) -> str:
    if not path.is_file():
        return f"{name} is missing"
    try:
        found = sha256_of(path, on_bytes)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return "" if found == digest else f"{name} ({path.stat().st_size} bytes) is not what was written"


def faults_of(
    directory: Path,
    names: Iterable[str],
    digests: Mapping[str, str],
    *,
    num_threads: int = 1,
    on_bytes: Callable[[int], None] = _no_report,
) -> list[str]:
    """What is wrong with the files `names`, one line each; nothing where all of them are as they were written."""

    def fault(name: str) -> str:
        return _fault_of(directory / name, name, digests[name], on_bytes)

    # hashlib lets go of the interpreter lock: a thread per core reads as fast as the disk, or the cores, allow
    with ThreadPoolExecutor(max_workers=num_threads) as threads:
        return [found for found in threads.map(fault, names) if found]


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


def _every_file(_: str) -> bool:
    return True


def verify(
    directory: str | Path, *, select: Callable[[str], bool] = _every_file, on_bytes: Callable[[int], None] = _no_report
) -> None:
    """Read a whole checkpoint, or the files that `select` wants by their names, in this process, with a few threads.

    `on_bytes` is called by them, with what each has read; an error that it raises ends the reading.

    Raises `CheckpointError` naming each file that is missing or damaged.
    """
    directory = Path(directory)
    digests = {name: digest for name, digest in read_checksums(directory).items() if select(name)}
    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    refuse(directory, faults_of(directory, sorted(digests), digests, num_threads=threads, on_bytes=on_bytes))
