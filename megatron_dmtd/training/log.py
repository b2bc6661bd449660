"""What a run writes while it trains: console lines, `metrics.jsonl`, wandb and a progress bar.

Names of values carry their units: `loss` and `loss_phase_<i>` (nats per target), `lr`, `grad_norm`, `tokens_per_s`,
`step_time_s`, `memory_gib`, `mfu` (0 to 1). Every line has its `step`, the `time` at which it was written (seconds since 1970,
UTC) and `elapsed_s` (seconds that the run has worked up to then, over all its attempts, without the time between them and without
steps that a resume lost). Of the run, this module measures nothing; and it knows nothing of ranks: the caller makes one `RunLog`,
with `is_writer` true on one rank only.

Layout of `logging.dir`: `metrics.jsonl` (one object per `log`, in order of steps, no step twice), `metrics.superseded.jsonl`
(lines of steps that were trained again after a resume), `wandb_run_id`, and wandb's own `wandb/`.

A full disk does not end the run here: `failure` reports it, `unwritten` keeps the lines, and the caller, who knows when the ranks
can stop together, saves and raises `error`.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_dmtd.config import LoggingConfig
from megatron_dmtd.errors import ConfigError, DMTDError, Refusal
from megatron_dmtd.infra.console import silence_stdout
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.json_lines import append, ends_torn, read_lines, to_line
from megatron_dmtd.training import exit_codes

METRICS_FILE = "metrics.jsonl"
SUPERSEDED_FILE = "metrics.superseded.jsonl"
RUN_ID_FILE = "wandb_run_id"
#: `resumed_step` of a run that starts at step 0: no line of an earlier run belongs to it, not even the baseline of step 0
NOT_RESUMED = -1
#: names that every line has, which the console leaves out
_CLOCK = ("time", "elapsed_s")
_NO_LOG = Refusal(
    ConfigError,
    required="one JSON object with a step on each line",
    remedy="move the file away, or set logging.dir to another folder",
)


class LogError(DMTDError):
    """A log that could not be written, in a run that stopped for it."""

    exit_status = exit_codes.NOT_LOGGED


def _record_of(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"step": int(values["step"])}


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a torn last line (its writer was killed). Raises `ConfigError` for a bad line."""
    return read_lines(Path(path), _record_of, _NO_LOG)


def rewind_metrics(directory: Path, *, resumed_step: int) -> None:
    """Truncate `metrics.jsonl` to `resumed_step`; later lines, whose steps are repeated, move to `metrics.superseded.jsonl`."""
    path = directory / METRICS_FILE
    if not path.is_file():
        return
    records, is_torn = read_metrics(path), ends_torn(path)
    superseded = [record for record in records if record["step"] > resumed_step]
    if not superseded and not is_torn:
        return  # a disk without room for a second copy does not matter
    if superseded:
        with open(directory / SUPERSEDED_FILE, "a") as file:
            file.write("".join(map(to_line, superseded)))
    write_atomically(path, "".join(to_line(record) for record in records if record["step"] <= resumed_step))


def _last_elapsed_s(directory: Path) -> float:
    """`elapsed_s` of the last line; 0 if there is none, or one written before lines had it."""
    path = directory / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    return float(records[-1].get("elapsed_s", 0.0)) if records else 0.0


def _wandb_run_id(directory: Path) -> str:
    path = directory / RUN_ID_FILE
    if not path.is_file():
        write_atomically(path, uuid.uuid4().hex[:8] + "\n")
    return path.read_text().strip()


def _kind_of(record: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """Identifies a line: no log has two for the same names and step."""
    return record["step"], frozenset(record)


def _start_wandb(config: LoggingConfig, run_config: Mapping[str, Any]) -> Any:
    import wandb

    if not config.dir:
        raise ConfigError(
            found=f"logging.wandb_project = {config.wandb_project!r} with an empty logging.dir",
            required="a folder that keeps the run's id, so that a resumed run continues it",
            remedy="set logging.dir, or leave logging.wandb_project empty",
        )
    # wandb would stop and ask for a key, which a job cannot answer. WANDB_MODE, if set, is the user's own choice.
    offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
    try:
        run = wandb.init(
            project=config.wandb_project,
            name=config.run_name or None,
            id=_wandb_run_id(Path(config.dir)),
            resume=None if offline else "allow",
            dir=config.dir,
            mode="offline" if offline else None,
            config=dict(run_config),
        )
    except wandb.errors.Error as error:
        raise ConfigError(
            found=f"wandb does not start: {error}",
            required="a wandb that does, or none",
            remedy="see to its key, network and logging.dir; or set WANDB_MODE=offline; or leave logging.wandb_project empty",
        ) from error
    # Our own step as the axis: wandb's counter only goes up and would drop the steps that are repeated after a resume.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _number(value: float) -> float:
    """As the line holds it: whole counts stay whole."""
    return value if isinstance(value, int) else float(value)


def _format(name: str, value: float) -> str:
    if name.endswith("lr"):
        return f"{name} {value:.3e}"
    return f"{name} {value:,.0f}" if abs(value) >= 10_000 else f"{name} {value:.4g}"


class RunLog:
    """The log of one run. Where `is_writer` is false every method does nothing.

    Raises `ConfigError`, before anything is written, if an existing `metrics.jsonl` is not one.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        is_writer: bool,
        total_steps: int,
        resumed_step: int = NOT_RESUMED,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._is_writer = is_writer
        self._total_steps = total_steps
        self._started, self._earlier_s = time.monotonic(), 0.0
        self._file: Any = None
        self._wandb: Any = None
        self._bar: Any = None
        self.failure = ""
        """What could not be written and why; empty if nothing has failed."""
        self.unwritten: list[dict[str, Any]] = []
        """Lines that `metrics.jsonl` lacks because of that, in order."""
        if not is_writer:
            return
        if config.dir:
            directory = Path(config.dir)
            directory.mkdir(parents=True, exist_ok=True)
            rewind_metrics(directory, resumed_step=resumed_step)
            self._earlier_s = _last_elapsed_s(directory)
            self._file = open(directory / METRICS_FILE, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        if config.wandb_project:
            self._wandb = _start_wandb(config, run_config or {})
        if config.progress:
            # disable=None: no bar where there is no terminal to redraw it
            self._bar = tqdm(total=total_steps, initial=max(resumed_step, 0), unit="step", disable=None, dynamic_ncols=True)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step` finished steps."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` after `step` finished steps everywhere. Steps do not go down."""
        if not self._is_writer:
            return
        assert not {"step", *_CLOCK} & values.keys(), values
        self.message(f"step {step}/{self._total_steps}  " + "  ".join(_format(name, value) for name, value in values.items()))
        elapsed_s = self._earlier_s + time.monotonic() - self._started
        clock = {"time": round(time.time(), 3), "elapsed_s": round(elapsed_s, 3)}
        self._write({"step": step} | clock | {name: _number(value) for name, value in values.items()})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None and self.failure:
            self.unwritten.append(record)  # after those that are waiting
        elif self._file is not None:
            try:
                append(self._file, to_line(record))
            except OSError as error:
                self._fail(METRICS_FILE, error)
                self.unwritten.append(record)
        if self._wandb is not None:
            try:
                self._wandb.log(record)
            except OSError as error:
                self._fail("wandb", error)

    def _fail(self, what: str, error: OSError) -> None:
        self.failure = self.failure or f"{what}: {error.strerror or error}"

    def make_up(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines that an earlier attempt of this run could not write, unless that has already been done."""
        if not self._is_writer or self._file is None:
            return
        written = {_kind_of(record) for record in read_metrics(self._file.name)}
        for record in records:
            self._earlier_s = max(self._earlier_s, float(record.get("elapsed_s", 0.0)))
            if _kind_of(record) not in written:
                self._write(dict(record))

    def error(self, *, saved: Path | None) -> LogError | None:
        """The error that ends a run whose log cannot be written; None if nothing has failed. `saved`: the newest checkpoint."""
        if not self.failure:
            return None
        lines = f"; {len(self.unwritten)} lines wait in the checkpoint" if saved and self.unwritten else ""
        return LogError(
            found=f"the log cannot be written: {self.failure}; " + (f"saved {saved}{lines}" if saved else "nothing is saved"),
            required="a logging.dir, and a console, that take every line",
            remedy="make room, or repair the folder, and start the same command again",
        )

    def message(self, text: str) -> None:
        """Print a line on the writer's console without breaking the progress bar."""
        if not self._is_writer:
            return
        try:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:
            self._fail("the console", error)
            silence_stdout()

    def close(self) -> None:
        """Close everything. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
