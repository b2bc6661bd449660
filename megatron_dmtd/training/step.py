"""One optimizer step, and one evaluation, on Megatron's schedules.

The run's objective defines the loss and the rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_dmtd.training.objectives import LossSums, Microbatch
from megatron_dmtd.training.state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one step."""

    loss: LossSums
    """Sums over the global batch; the same on every rank."""
    local_losses: tuple[LossSums, ...]
    """Sums of each microbatch of this rank, in order; empty on ranks that are not the last stage."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate that the step used."""
    num_rows: int
    """Rows of the step, over all ranks."""
    is_applied: bool
    """Whether the weights were updated. False if loss or gradient is not finite: then nothing at all has changed."""


def _forward_step(run: RunState, iterator: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(iterator).to(run.platform.device)
    return run.objective.forward(model, batch), functools.partial(_loss, run, batch)


def _loss(run: RunState, batch: Microbatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, LossSums]:
    """As Megatron's schedules take it. They divide the gradient by the counts of the whole step."""
    found = run.objective.loss(batch, output)
    return found.loss, found.count, found.sums


def _all_ranks_sum(run: RunState, parts: list[LossSums]) -> LossSums:
    """Sum the last stage's parts over data-parallel ranks and hand the sum to every stage."""
    total = run.objective.new_sums(device=run.platform.device)
    for part in parts:
        total.sums.add_(part.sums)
    if parallel_state.is_pipeline_last_stage():
        torch.distributed.all_reduce(total.sums, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            total.sums,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return total


def _run_schedule(run: RunState, iterator: Iterator[Microbatch], *, num_rows: int, forward_only: bool) -> list[LossSums]:
    """The sums of each microbatch of a global batch of `num_rows` rows."""
    num_microbatches = run.num_microbatches(num_rows)
    parts: list[LossSums] = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, run),
        # Each of this rank's stages sees every microbatch.
        data_iterator=list(itertools.tee(itertools.islice(iterator, num_microbatches), len(run.wrapped))),
        model=run.wrapped,
        num_microbatches=num_microbatches,
        seq_length=run.config.data.seq_length,
        micro_batch_size=run.config.training.micro_batch_size,
        forward_only=forward_only,
    )
    return parts


def _update(optimizer: Any, *, grad_norm: float) -> None:
    """Clip and step, as `ChainedOptimizer.step` does after computing the norm, which the caller has checked."""
    for part in optimizer.chained_optimizers:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


def train_step(run: RunState, iterator: Iterator[Microbatch]) -> StepResult:
    """Forward, backward, and one update; advances `run`. A step whose loss or gradient is not finite changes nothing."""
    for chunk in run.wrapped:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    num_rows = run.batch_size
    parts = _run_schedule(run, iterator, num_rows=num_rows, forward_only=False)
    loss = _all_ranks_sum(run, parts)
    lr = max(group["lr"] for group in run.optimizer.param_groups)
    run.optimizer.prepare_grads()
    grad_norm = float(run.optimizer.get_grad_norm())
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss.values().get("loss", 0.0))
    if is_finite:
        _update(run.optimizer, grad_norm=grad_norm)
        advance(run)
    return StepResult(loss=loss, local_losses=tuple(parts), grad_norm=grad_norm, lr=lr, num_rows=num_rows, is_applied=is_finite)


def advance(run: RunState) -> None:
    """Count a step as done: schedule, step and rows. Also how the caller skips a bad step."""
    run.scheduler.step(increment=1)
    run.step += 1
    run.rows += run.batch_size


@torch.no_grad()
def evaluate(
    run: RunState, iterator: Iterator[Microbatch], *, num_batches: int, before_batch: Callable[[], None] = lambda: None
) -> LossSums:
    """Loss over `num_batches` global batches, in evaluation mode; the model is left in training mode.

    `before_batch` is called on every rank before each global batch, and may raise to end the evaluation.
    """
    total = run.objective.new_sums(device=run.platform.device)
    overlap = run.config.parallel.overlap_param_gather
    for chunk in run.wrapped:
        if overlap:
            chunk.disable_forward_pre_hook()
        chunk.eval()
    try:
        for _ in range(num_batches):
            before_batch()
            parts = _run_schedule(run, iterator, num_rows=run.config.training.global_batch_size, forward_only=True)
            total.sums.add_(_all_ranks_sum(run, parts).sums)
    finally:
        for chunk in run.wrapped:
            chunk.train()
            if overlap:
                chunk.enable_forward_pre_hook()
    return total
