"""Losses and gradients that are not finite, and losses that jump: detected before they do harm, and reported.

A bad step changes nothing: weights, moments and counters stay as they were before it. The loop then skips it or stops. Either
way `bad_step_<step>.json` contains what reproduces it: the step, the rows and ranks, and where the numbers went bad.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_dmtd.config import to_dict
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.training import exit_codes
from megatron_dmtd.training.health.consensus import broadcast_from_first, gathered_on_first
from megatron_dmtd.training.state import RunState
from megatron_dmtd.training.step import StepResult

_NAMED_PARAMETERS = 20
#: losses that a spike is measured against, and how many of them there must be
SPIKE_WINDOW, SPIKE_MINIMUM = 64, 16


class NonFiniteError(DMTDError):
    """Training that cannot go on: a loss or gradient is not finite, and no more steps may be skipped."""

    exit_status = exit_codes.NON_FINITE


def rows_of_microbatch(run: RunState, microbatch: int) -> list[int]:
    """Rows of a microbatch of the step that comes next on this rank, by the rule of `data/batches/loader.py`."""
    micro_batch_size = run.config.training.micro_batch_size
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    begin = run.rows + (microbatch * ranks + rank) * micro_batch_size
    return list(range(begin, begin + micro_batch_size))


def _bad_gradients(run: RunState) -> list[str]:
    """Names of parameters whose gradient, as this rank holds it, is not finite; the first few."""
    parameters = [pair for model in run.models for pair in model.named_parameters()]
    named = ((name, getattr(parameter, "main_grad", None)) for name, parameter in parameters)
    bad = [name for name, gradient in named if gradient is not None and not bool(torch.isfinite(gradient).all())]
    return bad[:_NAMED_PARAMETERS]


def _report_of_rank(run: RunState, result: StepResult) -> dict[str, Any]:
    return {
        "rank": torch.distributed.get_rank(),
        "host": socket.gethostname(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline_stage": parallel_state.get_pipeline_model_parallel_rank(),
        "data_rank": parallel_state.get_data_parallel_rank(),
        "rows": [rows_of_microbatch(run, microbatch) for microbatch in range(run.num_microbatches(run.batch_size))],
        # Only the last stage computes losses.
        "loss_of_microbatches": [str(part.values().get("loss", "no targets")) for part in result.local_losses],
        "parameters_with_bad_gradients": _bad_gradients(run),
    }


def write_report(run: RunState, result: StepResult, *, loss: float) -> Path | None:
    """Write `bad_step_<step>.json` into the folder of the checkpoints, or else of the log. Collective.

    None if the run has neither, or the file cannot be written: then the report is on standard error.
    """
    folder = run.config.checkpoint.dir or run.config.logging.dir
    reports = gathered_on_first(_report_of_rank(run, result))
    if not folder:
        return None
    path, is_written = Path(folder) / f"bad_step_{run.step + 1:08d}.json", True
    if reports:
        report = {
            "step": run.step + 1,
            "loss": str(loss),
            "grad_norm": str(result.grad_norm),
            "lr": result.lr,
            "rows": [run.rows, run.rows + run.batch_size - 1],
            "ranks": reports,
            "config": to_dict(run.config),
        }
        is_written = _is_written(path, json.dumps(report, indent=2) + "\n")
    return path if broadcast_from_first(is_written) else None


def _is_written(path: Path, text: str) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}):\n{text}", file=sys.stderr)
        return False
    return True


def is_bad(result: StepResult, loss: float) -> bool:
    """Whether a step's loss or gradient is not finite. The same on every rank."""
    return not (math.isfinite(loss) and math.isfinite(result.grad_norm))


def stop(run: RunState, result: StepResult, *, loss: float, report: Path | None, saved: Path | None) -> NonFiniteError:
    """The error that ends the run."""
    first, last = run.rows, run.rows + run.batch_size - 1
    allowed = run.config.training.max_bad_steps
    details = [f"the report is {report}"] if report else []
    details += [f"the state before the step is {saved}: the same command repeats it"] if saved else []
    return NonFiniteError(
        found=f"loss {loss}, gradient norm {result.grad_norm} at step {run.step + 1}, rows {first} to {last}"
        + (f"; {'; '.join(details)}" if details else ""),
        required="finite numbers" + (f", after the {allowed} steps that training.max_bad_steps lets pass" if allowed else ""),
        remedy="resume from an earlier checkpoint with a lower optimizer.lr, look at these rows, or let steps be skipped with "
        "training.max_bad_steps",
    )


def spike(recent: list[float], loss: float, *, deviations: float) -> tuple[float, float] | None:
    """Mean and standard deviation of the recent losses if `loss` is far above them; else None. Adds the loss to `recent`."""
    found = None
    if deviations > 0 and len(recent) >= SPIKE_MINIMUM:
        mean, deviation = statistics.fmean(recent), statistics.pstdev(recent)
        found = (mean, deviation) if loss > mean + deviations * deviation else None
    recent.append(loss)
    del recent[:-SPIKE_WINDOW]
    return found
