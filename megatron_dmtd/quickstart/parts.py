"""Parts of a longer job that run once: finished ones are reused, interrupted ones resumed, outdated ones repeated.

A part has a stamp, `DIR/.parts/NAME.json`, with its inputs and whether it finished. Nothing here depends on models.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.json_files import parse_object
from megatron_dmtd.infra.locks import FileLock
from megatron_dmtd.infra.processes import STARTED_BY, die_with, end_family
from megatron_dmtd.quickstart.failures import reason

#: seconds that an interrupted command has to save and end; torchrun gives its ranks 30
PATIENCE_S = 40.0


class PartError(DMTDError):
    """A part of a longer job that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a job."""

    name: str
    """Name of the part, for its stamp and in messages."""
    inputs: Mapping[str, Any]
    """What determines the result, as JSON values; if it reads another part's output, that part's inputs are included."""
    outputs: tuple[Path, ...]
    """Files and folders that it creates."""
    work: Callable[[], None]
    """Creates the outputs; resumes from or replaces those that an interrupted attempt left behind."""


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock a folder for this process until the end of the block. Raises `PartError` if another process has it."""
    stamps = directory / ".parts"
    stamps.mkdir(parents=True, exist_ok=True)
    with FileLock(stamps / "lock") as lock:
        if not lock.try_acquire():
            raise PartError(
                found=f"{directory} is in use by process {lock.read_note().decode(errors='replace') or '?'}",
                required="a folder that no other quickstart writes to",
                remedy="wait for the other one or end it, or choose another folder with --output",
            )
        lock.write_note(str(os.getpid()).encode())
        yield


class Parts:
    """The parts that write to one folder."""

    def __init__(self, directory: Path, *, say: Callable[[str], None]) -> None:
        self._stamps = directory / ".parts"
        self._say = say

    def run(self, part: Part) -> float:
        """Run `part` unless it is finished. Returns the seconds that it took, now or earlier."""
        stamp = self._read(part)
        inputs = json.loads(json.dumps(part.inputs))
        if stamp.get("inputs") != inputs:
            self._remove(part)
        elif stamp["finished"] and all(path.exists() for path in part.outputs):
            self._say(f"{part.name}: already done")
            return float(stamp["seconds"])
        spent = float(stamp["seconds"]) if stamp.get("inputs") == inputs and not stamp["finished"] else 0.0
        self._write(part, {"inputs": inputs, "finished": False, "seconds": spent})
        started = time.monotonic()
        try:
            part.work()
        finally:
            spent += time.monotonic() - started
            self._write(part, {"inputs": inputs, "finished": False, "seconds": spent})
        missing = [str(path) for path in part.outputs if not path.exists()]
        assert not missing, f"{part.name} ended without {missing}"
        self._write(part, {"inputs": inputs, "finished": True, "seconds": spent})
        return spent

    def _path(self, part: Part) -> Path:
        return self._stamps / f"{part.name.replace(' ', '-')}.json"

    def _read(self, part: Part) -> dict[str, Any]:
        try:
            stamp = parse_object(self._path(part).read_text())
        except (FileNotFoundError, ValueError):
            return {}  # never started, or an incomplete stamp: run it again
        return stamp if {"inputs", "finished", "seconds"} <= stamp.keys() else {}

    def _write(self, part: Part, stamp: Mapping[str, Any]) -> None:
        path = self._path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(stamp, indent=2) + "\n")

    def _remove(self, part: Part) -> None:
        for path in part.outputs:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def progress_bar(**options: Any) -> tqdm:
    """A bar on stderr: redrawn continuously on a terminal, otherwise one line every ten seconds."""
    return tqdm(dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 10.0, **options)


def redraw(bar: tqdm) -> None:
    """Update the elapsed time although the bar does not move, if a bar can be redrawn."""
    if sys.stderr.isatty():
        bar.refresh()


def run_command(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path,
    environment: Mapping[str, str],
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> None:
    """Run a command with its output appended to `log`, calling `watch` while it runs.

    Raises `PartError` with the reason, found in the log, if it fails. If this process is interrupted, or ends otherwise,
    the command is asked to end too, and ends whatever it started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as stream:
        stream.write("$ " + " ".join(command) + "\n")
        stream.flush()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**environment, STARTED_BY: str(os.getpid())},
            process_group=0,  # Ctrl-C is for this process, which passes it on once
            preexec_fn=functools.partial(die_with, os.getpid(), number=signal.SIGTERM),
        )
        try:
            while process.poll() is None:
                watch()
                time.sleep(poll_s)
            watch()
        except KeyboardInterrupt:
            print("\ninterrupted: waits until this part has stopped; Ctrl-C again does not wait", file=sys.stderr, flush=True)
            raise
        finally:
            if process.poll() is None:
                end_family(process, patience_s=PATIENCE_S)
    if process.returncode != 0:
        raise _failure(command, log, process.returncode)


def _failure(command: Sequence[str], log: Path, status: int) -> PartError:
    why = reason(log.read_text(errors="replace"), status=status)
    script = next((word for word in command if word.endswith(".py")), Path(command[0]).name)
    first = f"{why.remedy}; " if why.remedy else ""
    return PartError(
        found=f"{script} failed (exit status {status}): {why.found}",
        required=why.required,
        remedy=f"{first}then run the quickstart again, which resumes from here. The whole log: {log}",
    )
