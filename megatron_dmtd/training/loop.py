"""The training loop: steps, evaluations, checkpoints and log lines, from one validated configuration.

`prepare` does everything that may refuse; `train` then only works. Every rank runs the same code.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_dmtd.config import Config, to_dict, validate
from megatron_dmtd.data.batch import Batch
from megatron_dmtd.data.dataset import PackedDataset
from megatron_dmtd.data.loader import batches
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.parallel.groups import init_parallel, rank_of_environment, world_size_of_environment
from megatron_dmtd.platform import Platform
from megatron_dmtd.training import paths
from megatron_dmtd.training.checkpoint import check_resumable, check_weights, load_checkpoint, load_weights, save_checkpoint
from megatron_dmtd.training.flops import mfu, training_flops_per_token
from megatron_dmtd.training.log import RunLog
from megatron_dmtd.training.metrics import PhaseLoss
from megatron_dmtd.training.setup import Run, build_run
from megatron_dmtd.training.step import StepResult, evaluate, train_step


class TrainingError(DMTDError):
    """Training that cannot go on, such as a loss that is not a number."""


def _dataset(config: Config, prefixes: tuple[str, ...], *, shuffled: bool) -> PackedDataset:
    return PackedDataset(
        prefixes,
        seq_length=config.data.seq_length,
        cycle_length=config.cycle.cycle_length,
        pad_token_id=config.data.pad_token_id,
        shuffle_seed=config.data.shuffle_seed if shuffled else None,
        vocab_size=config.model.vocab_size,
        mask_token_id=None if config.cycle.is_vanilla else config.cycle.mask_token_id,
    )


def _iterator(run: Run, dataset: PackedDataset, *, first_row: int, end_row: int | None = None) -> Iterator[Batch]:
    return batches(
        dataset,
        first_row=first_row,
        global_batch_size=run.config.training.global_batch_size,
        micro_batch_size=run.config.training.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        end_row=end_row,
    )


def resume_directory(config: Config) -> Path | None:
    """The checkpoint that a run with this configuration goes on from; None for a new run."""
    if not config.checkpoint.dir or not config.checkpoint.resume:
        return None
    return paths.latest_directory(Path(config.checkpoint.dir))


def check(config: Config, *, world_size: int) -> None:
    """Refuse, before any process group or weight exists, whatever cannot run: settings, corpora, checkpoints."""
    validate(config, world_size=world_size)
    _dataset(config, config.data.train, shuffled=True)
    if config.data.valid:
        _dataset(config, config.data.valid, shuffled=False)
    if (directory := resume_directory(config)) is not None:
        check_resumable(config, directory)
    elif config.checkpoint.init_from:
        check_weights(config, paths.find_step_directory(config.checkpoint.init_from))


def prepare(config: Config, platform: Platform) -> Run:
    """A run ready for its next step: built, and restored from its newest checkpoint or from `init_from`."""
    init_parallel(config, platform)
    run = build_run(config, platform)
    if (directory := resume_directory(config)) is not None:
        load_checkpoint(run, directory)
    elif config.checkpoint.init_from:
        load_weights(run, config.checkpoint.init_from)
    return run


def _evaluate(run: Run, dataset: PackedDataset) -> PhaseLoss:
    """Loss on the first `eval_batches` global batches of the held-out corpus, or on all of it; no row counts twice."""
    whole = math.ceil(dataset.rows_per_epoch / run.config.training.global_batch_size)
    num_batches = min(run.config.training.eval_batches or whole, whole)
    return evaluate(run, _iterator(run, dataset, first_row=0, end_row=dataset.rows_per_epoch), num_batches=num_batches)


def _due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)


class _Pace:
    """Throughput since the last log line, evaluations and saves left out."""

    def __init__(self, run: Run) -> None:
        config = run.config
        self.platform = run.platform
        self.tokens_per_step = config.training.global_batch_size * config.data.seq_length
        self.flops_per_token = training_flops_per_token(config.model, config.cycle, document_length=config.data.seq_length)
        self.peak_tflops = config.logging.peak_tflops
        self.restart()

    def restart(self) -> None:
        self.steps, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.platform.synchronize()
        self.steps += 1
        self.seconds += time.perf_counter() - started

    def values(self) -> dict[str, float]:
        tokens = self.steps * self.tokens_per_step
        values = {"step_time_s": self.seconds / self.steps, "tokens_per_s": tokens / self.seconds}
        if self.peak_tflops > 0:
            values["mfu"] = mfu(
                flops=tokens * self.flops_per_token,
                seconds=self.seconds,
                num_devices=torch.distributed.get_world_size(),
                peak_tflops=self.peak_tflops,
            )
        return values | {"memory_gib": self.platform.peak_memory_gib()}


def _refuse_bad_loss(run: Run, result: StepResult) -> None:
    loss = result.loss.values().get("loss", 0.0)
    if not (math.isfinite(loss) and math.isfinite(result.grad_norm)):
        raise TrainingError(
            found=f"loss {loss}, gradient norm {result.grad_norm} at step {run.step}",
            required="finite numbers",
            remedy="resume from the last checkpoint with a lower optimizer.lr, or look at the rows of this step: "
            f"{run.rows - run.config.training.global_batch_size} to {run.rows - 1}",
        )


def train(run: Run, log: RunLog) -> dict[str, float]:
    """Run to `training.steps`. Returns the last evaluation's values, or the last step's where nothing is held out."""
    config = run.config
    dataset = _dataset(config, config.data.train, shuffled=True)
    held_out = _dataset(config, config.data.valid, shuffled=False) if config.data.valid else None
    iterator = _iterator(run, dataset, first_row=run.rows)
    since_log = PhaseLoss(config.cycle.cycle_length, device=run.platform.device)
    pace, last, values = _Pace(run), config.training.steps, {}
    while run.step < last:
        with pace.step():
            result = train_step(run, iterator)
        _refuse_bad_loss(run, result)
        since_log.merge(result.loss)
        log.advance(run.step)
        if _due(run.step, config.logging.interval, last):
            values = since_log.values() | {"lr": result.lr, "grad_norm": result.grad_norm} | pace.values()
            log.log(run.step, values)
            since_log.reset()
            pace.restart()
        if held_out is not None and _due(run.step, config.training.eval_interval, last):
            values = _evaluate(run, held_out).values(prefix="eval_")
            log.log(run.step, values)
        if config.checkpoint.dir and _due(run.step, config.checkpoint.interval, last):
            log.message(f"saved {save_checkpoint(run, config.checkpoint.dir)}")
    return values


def run_training(config: Config, platform: Platform) -> dict[str, float]:
    """The whole job: check, prepare, train, close. Raises `DMTDError`s for what the user can mend."""
    check(config, world_size=world_size_of_environment())
    run = prepare(config, platform)
    log = RunLog(
        config.logging,
        is_writer=rank_of_environment() == 0,
        total_steps=config.training.steps,
        resumed_step=run.step,
        run_config=to_dict(config),
    )
    with contextlib.closing(log):
        log.message(f"{config.cycle.variant} on {platform.describe()}, {torch.distributed.get_world_size()} processes")
        if run.step:
            log.message(f"resumed at step {run.step}")
        return train(run, log)
