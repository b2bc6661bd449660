"""Decide whether a job may start again: yes, unless too many starts in a row have brought no newer checkpoint.

    python -m megatron_dmtd.launch.restarts begin --state FILE --limit 3 -- OPTIONS OF tools/train.py
    python -m megatron_dmtd.launch.restarts again --state FILE --limit 3 --status 5 -- OPTIONS OF tools/train.py

A job calls `begin` when it starts, because a job that loses a node cannot count its attempt at the end, and `again` when an
attempt has failed. Exit status of both: 0 yes, 7 no, 2 refused. The file records the status of the last attempt. No torch: this
runs before anything is known to work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.config import load_config
from megatron_dmtd.errors import ConfigError, DMTDError, Refusal
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.training.checkpoints.paths import latest_directory, step_of

EXHAUSTED = 7
_NO_STATE = Refusal(
    ConfigError,
    required="a record of attempts written by this command",
    remedy="name another --state, or remove the file: attempts are then counted from the beginning",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """Record of a job's earlier attempts."""

    number: int = 0
    """Number of attempts started."""
    step: int = -1
    """Step of the newest checkpoint when the last attempt started; 0 if there was none."""
    without_progress: int = 0
    """Restarts in a row that found no newer checkpoint than the attempt before."""
    last_status: int = 1
    """Exit status of the last failed attempt; 1 if unknown."""

    def begun(self, *, step: int) -> Attempts:
        """The record after another attempt has started at `step`."""
        stands_still = self.number > 0 and step <= self.step
        return dataclasses.replace(
            self, number=self.number + 1, step=step, without_progress=self.without_progress + 1 if stands_still else 0
        )

    def may_restart(self, *, step: int, limit: int) -> bool:
        """Whether another attempt may follow one that reached `step` and failed."""
        return step > self.step or self.without_progress < limit


def read_attempts(path: Path) -> Attempts:
    """The attempts recorded in a file; none if there is no file. Raises `ConfigError` if it holds anything else."""
    if not path.is_file():
        return Attempts()
    fields = read_object(path, _NO_STATE)
    try:
        return Attempts(**fields)
    except TypeError as error:
        raise _NO_STATE(f"{path}: {error}") from error


def newest_step(options: Sequence[str]) -> int:
    """Step of the newest checkpoint of the run that these options of `tools/train.py` describe; 0 if none. Raises `DMTDError`."""
    folder = load_config(options).checkpoint.dir
    directory = latest_directory(Path(folder)) if folder else None
    return (step_of(directory) or 0) if directory is not None else 0


def _begin(state: Path, step: int, limit: int) -> int:
    attempts = read_attempts(state).begun(step=step)
    write_atomically(state, json.dumps(dataclasses.asdict(attempts)) + "\n")
    print(f"attempt {attempts.number} begins at step {step}; {attempts.without_progress} restarts without progress", flush=True)
    if attempts.without_progress > limit:
        _give_up(attempts, limit)
        return EXHAUSTED
    return 0


def _again(state: Path, step: int, limit: int, status: int) -> int:
    attempts = dataclasses.replace(read_attempts(state), last_status=status)
    write_atomically(state, json.dumps(dataclasses.asdict(attempts)) + "\n")
    if attempts.may_restart(step=step, limit=limit):
        return 0
    _give_up(attempts, limit)
    return EXHAUSTED


def _give_up(attempts: Attempts, limit: int) -> None:
    print(
        f"found: {attempts.without_progress} restarts without a checkpoint after step {attempts.step}; the last attempt ended "
        f"with status {attempts.last_status}\n"
        f"required: a newer checkpoint at least every {limit} restarts (MAX_RESTARTS)\n"
        "remedy: find the cause in the ranks' logs (docs/slurm.md), fix it and submit again: the run resumes from its checkpoint",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["begin", "again"])
    parser.add_argument("--state", type=Path, required=True, help="file that records the job's attempts")
    parser.add_argument(
        "--limit", type=int, required=True, help="allowed number of consecutive restarts without a newer checkpoint"
    )
    parser.add_argument("--status", type=int, default=1, help="with `again`: exit status of the attempt")
    parsed = parser.parse_args(words[:cut])
    try:
        step = newest_step(words[cut + 1 :])
        if parsed.action == "begin":
            return _begin(parsed.state, step, parsed.limit)
        return _again(parsed.state, step, parsed.limit, parsed.status)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
