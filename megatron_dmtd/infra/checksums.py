"""SHA-256 of every file of a directory, in the format of `sha256sum`: `cd DIRECTORY && sha256sum -c checksums.sha256`.

For formats that have no checksums of their own: damage inside a tensor's bytes would go unnoticed when it is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_dmtd.errors import Refusal
from megatron_dmtd.infra.digests import no_report, sha256_of_file
from megatron_dmtd.infra.files import write_durably

CHECKSUMS_FILE = "checksums.sha256"
#: names are relative to the directory: nothing outside it is ever read
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>(?!\.\.?(/|$))[^/\n]+(/(?!\.\.?(/|$))[^/\n]+)*)")
_MAX_THREADS = 8


def write_checksums(directory: Path, digests: Mapping[str, str] | None = None) -> None:
    """Record the digest of every file of `directory`; those given in `digests`, by name, are not computed again."""
    files = (path for path in directory.rglob("*") if path.is_file())
    names = sorted(path.relative_to(directory).as_posix() for path in files if path.name != CHECKSUMS_FILE)
    known = digests or {}
    lines = [f"{known.get(name) or sha256_of_file(directory / name)}  {name}\n" for name in names]
    write_durably(directory / CHECKSUMS_FILE, "".join(lines).encode())


def has_checksums(directory: Path) -> bool:
    """Whether the directory's digests are recorded."""
    return (directory / CHECKSUMS_FILE).is_file()


def read_checksums(directory: Path, refusal: Refusal) -> dict[str, str]:
    """Digest of each file, by name. Raises `refusal` if the record is absent or malformed."""
    path = directory / CHECKSUMS_FILE
    if not path.is_file():
        raise refusal(f"{directory}: no {CHECKSUMS_FILE}")
    matches = [_LINE.fullmatch(line) for line in path.read_bytes().decode(errors="replace").splitlines()]
    if not matches or None in matches:
        raise refusal(f"{directory}: {CHECKSUMS_FILE} itself is damaged")
    return {match["name"]: match["digest"] for match in matches if match is not None}


def num_bytes(directory: Path, refusal: Refusal) -> int:
    """Size of all files that a directory's record names and that exist. Raises as `read_checksums` does."""
    paths = (directory / name for name in read_checksums(directory, refusal))
    return sum(path.stat().st_size for path in paths if path.is_file())


def _fault_of(path: Path, name: str, digest: str, on_bytes: Callable[[int], None]) -> str:
    if not path.is_file():
        return f"{name} is missing"
    try:
        found = sha256_of_file(path, on_bytes)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return "" if found == digest else f"{name} ({path.stat().st_size} bytes) is not what was written"


def faults_of(
    directory: Path,
    names: Iterable[str],
    digests: Mapping[str, str],
    *,
    num_threads: int = 1,
    on_bytes: Callable[[int], None] = no_report,
) -> list[str]:
    """What is wrong with the files `names`, one line each; empty if all of them are as they were written."""

    def fault(name: str) -> str:
        return _fault_of(directory / name, name, digests[name], on_bytes)

    # hashlib releases the interpreter lock: a thread per core reads as fast as the disk, or the cores, allow
    with ThreadPoolExecutor(max_workers=num_threads) as threads:
        return [found for found in threads.map(fault, names) if found]


def refuse(directory: Path, faults: Iterable[str], refusal: Refusal) -> None:
    """Raise `refusal` if there is any fault."""
    if faults := list(faults):
        raise refusal(f"{directory}: " + "; ".join(faults))


def _every_file(_: str) -> bool:
    return True


def verify(
    directory: str | Path,
    refusal: Refusal,
    *,
    select: Callable[[str], bool] = _every_file,
    on_bytes: Callable[[int], None] = no_report,
) -> None:
    """Verify a whole directory, or the files whose names `select` accepts, in this process, with a few threads.

    The threads call `on_bytes` with the size of each block that they have read. An error that it raises ends the reading, unless
    it is an `OSError`, which is treated as an error of the file.

    Raises `refusal` naming each file that is missing or damaged.
    """
    directory = Path(directory)
    digests = {name: digest for name, digest in read_checksums(directory, refusal).items() if select(name)}
    threads = min(os.cpu_count() or 1, _MAX_THREADS)
    refuse(directory, faults_of(directory, sorted(digests), digests, num_threads=threads, on_bytes=on_bytes), refusal)
