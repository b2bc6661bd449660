"""The training loop: steps, evaluations, checkpoints and log lines, from one validated configuration.

`start.py` does everything that may refuse; `Trainer` then only works. All ranks run the same code and make every decision
together; `docs/fault_tolerance.md` says what happens on signals, non-finite numbers, stalls and full disks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dmtd.config import Config, to_dict
from megatron_dmtd.data.batches.rows import RowSource
from megatron_dmtd.errors import CheckpointError, ConfigError, DMTDError
from megatron_dmtd.parallel.groups import rank_of_environment, world_size_of_environment
from megatron_dmtd.platform import Platform
from megatron_dmtd.platform.products import has_bf16_instructions
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.compatibility import differences
from megatron_dmtd.training.checkpoints.saving import Saver
from megatron_dmtd.training.health import non_finite, targets
from megatron_dmtd.training.health.consensus import any_rank, broadcast_from_first, raise_together
from megatron_dmtd.training.health.signals import StopRequested, StopSignals
from megatron_dmtd.training.health.throughput import Throughput, peak_tflops
from megatron_dmtd.training.health.watchdog import Watchdog, watched
from megatron_dmtd.training.log import METRICS_FILE, NOT_RESUMED, RunLog, read_metrics
from megatron_dmtd.training.objectives import LossSums
from megatron_dmtd.training.progress import Progress
from megatron_dmtd.training.rows import OpenSources, microbatches, open_corpora, with_bos
from megatron_dmtd.training.start import build, check, join, locked_folders, resume_directory
from megatron_dmtd.training.state import RunState
from megatron_dmtd.training.step import StepResult, advance, evaluate, train_step
from megatron_dmtd.weights.checkpoint_files import saved_config


def _due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)


def held_out_loss(run: RunState, rows: RowSource[Any], before_batch: Callable[[], None] = lambda: None) -> LossSums:
    """Loss over the first `eval_batches` global batches of the held-out rows, or all of them; no row counts twice."""
    training = run.config.training
    whole = math.ceil(rows.rows_per_epoch / training.global_batch_size)
    num_batches = min(training.eval_batches or whole, whole)
    iterator = microbatches(run, rows, first_row=0, end_row=rows.rows_per_epoch)
    return evaluate(run, iterator, num_batches=num_batches, before_batch=before_batch)


class _EvaluationCutShort(Exception):
    """A signal arrived while the held-out loss was being measured."""


class Trainer:
    """One rank of a run at work. Every rank calls the same methods at the same time."""

    def __init__(
        self,
        run: RunState,
        progress: Progress,
        log: RunLog,
        throughput: Throughput,
        *,
        open_sources: OpenSources,
        signals: StopSignals,
        watchdog: Watchdog,
    ) -> None:
        self.run, self.progress, self.log = run, progress, log
        self.signals, self.watchdog = signals, watchdog
        self._open_sources = open_sources
        folder = run.config.checkpoint.dir
        self.saver = Saver(run, folder, on_progress=self._beat_while_saving) if folder else None
        self.values: dict[str, float] = {}
        """The values of the last evaluation, or of the last log line if nothing is held out."""
        self._is_resumed = resume_directory(run.config) is not None
        self._saved_step = run.step if self._is_resumed else None
        self._throughput = throughput

    def train(self) -> dict[str, float]:
        """Run to `training.steps` and return `values`.

        Raises `StopRequested` after a save if any rank was signalled, `LogError` after one if the log cannot be written,
        `NonFiniteError` if loss or gradient is not finite, `SaveError` if a checkpoint cannot be written, `CheckpointError` if
        the corpora are not those of the checkpoint.
        """
        config, run = self.run.config, self.run
        self._open_data()
        if self._is_baseline_due():
            self._evaluate()
        elif self.progress.evaluation_due:
            self._evaluate()
            self._saved_step = None  # the checkpoint of this step says that the evaluation is still due
        while run.step < config.training.steps and not self._must_stop():
            self._report(self._step())
            if self._held_out is not None and _due(run.step, config.training.eval_interval, config.training.steps):
                self._evaluate()
            if _due(run.step, config.checkpoint.interval, config.training.steps):
                self._start_save()
        self._finish()
        return self.values

    def _open_data(self) -> None:
        config = self.run.config
        self._beat("building data indices", allowed_s=config.parallel.timeout_s)
        sources = self._open_sources(config)
        self._held_out = sources.valid
        corpus = [sources.train.rows_per_epoch, sources.train.targets_per_epoch]
        if self.progress.corpus and self.progress.corpus != corpus:
            raise CheckpointError(
                found=f"{self.progress.corpus[0]} rows and {self.progress.corpus[1]} targets per epoch when the checkpoint was "
                f"written, {corpus[0]} and {corpus[1]} in data.train now",
                required="the same corpora: the run counts rows, and these would be different rows",
                remedy="correct data.train, or start from the weights with checkpoint.init_from",
            )
        self.progress.corpus = corpus
        iterator = microbatches(self.run, sources.train, first_row=self.run.rows)
        self._batches = watched(iterator, self.watchdog, phase="step", step=lambda: self.run.step)

    def _is_baseline_due(self) -> bool:
        """Whether the run begins now, and is to be evaluated before its first step."""
        return self._held_out is not None and self.run.config.training.eval_at_start and not self._is_resumed

    def _seen(self) -> dict[str, float]:
        """How much data the run has consumed, over all its attempts: slots of the rows, and passes over the corpora."""
        run, rows_per_epoch = self.run, self.progress.corpus[0]
        seen: dict[str, float] = {"tokens_seen": run.rows * run.config.data.seq_length}
        return seen | ({"epoch": run.rows / rows_per_epoch} if rows_per_epoch else {})

    def _log(self, values: Mapping[str, float]) -> None:
        self.log.log(self.run.step, {**values, **self._seen()})

    def _beat(self, phase: str, *, allowed_s: float = 0.0) -> None:
        self.watchdog.beat(phase, step=self.run.step, allowed_s=allowed_s)

    def _beat_while_saving(self) -> None:
        self._beat("save", allowed_s=self.run.config.parallel.timeout_s)

    def _must_stop(self) -> bool:
        """Whether any rank was signalled, or lost its log. A background save that is complete is also made visible here."""
        writing = self.saver is not None and self.saver.is_writing
        wants_to_stop = self.signals.received or bool(self.log.failure)
        must_stop, is_writing = any_rank((wants_to_stop, writing), device=self.run.platform.device)
        if not is_writing:
            self._finish_save()
        return must_stop

    def _step(self) -> StepResult:
        """One step, done or skipped. Raises `NonFiniteError` if it may not be skipped."""
        self._beat("step")
        with self._throughput.step():
            result = train_step(self.run, self._batches)
        self._beat("after a step")
        if not result.is_applied:
            self._skip(result)
        return result

    def _skip(self, result: StepResult) -> None:
        loss = result.loss.values().get("loss", 0.0)
        report = non_finite.write_report(self.run, result, loss=loss)
        if self.progress.bad_steps >= self.run.config.training.max_bad_steps:
            saved = self._save_now()
            raise non_finite.stop(self.run, result, loss=loss, report=report, saved=saved)
        self.progress.bad_steps += 1
        advance(self.run)
        where = report or "standard error"
        self.log.message(f"step {self.run.step} skipped: loss {loss}, gradient norm {result.grad_norm}; see {where}")
        self._log({"skipped_steps": self.progress.bad_steps})

    def _note(self, result: StepResult) -> None:
        """Record a step's loss for the next log line and for the detection of spikes; say if it had no targets."""
        self.progress.since_log.sums.add_(result.loss.sums)
        self._count_targets(result)
        if result.loss.num_targets == 0:
            return
        loss = result.loss.values()["loss"]
        deviations = self.run.config.logging.spike_deviations
        if (found := non_finite.spike(self.progress.recent_losses, loss, deviations=deviations)) is not None:
            mean, deviation = found
            self._log({"spike_loss": loss, "usual_loss": mean, "usual_deviation": deviation})

    def _count_targets(self, result: StepResult) -> None:
        step, optimizer = self.run.step, self.run.config.optimizer
        num_targets = result.loss.num_targets
        if message := targets.count(self.progress, num_targets=num_targets, step=step, lr=result.lr, optimizer=optimizer):
            self.log.message(message)
            in_a_row = self.progress.without_targets_in_a_row
            self._log({"steps_without_targets": self.progress.steps_without_targets, "without_targets_in_a_row": in_a_row})

    def _report(self, result: StepResult) -> None:
        config, step = self.run.config, self.run.step
        if result.is_applied:
            self._note(result)
        self.log.advance(step)
        if _due(step, config.logging.interval, config.training.steps):
            rates = {"lr": result.lr, "grad_norm": result.grad_norm} | self._throughput.values()
            if config.training.rampup_batch_size:
                rates["global_batch_size"] = result.num_rows
            if self.progress.steps_without_targets:
                rates["steps_without_targets"] = self.progress.steps_without_targets
            self.values = self.progress.since_log.values() | rates
            self._log(self.values)
            self.progress.since_log.sums.zero_()
            self._throughput.restart()

    def _evaluate(self) -> None:
        assert self._held_out is not None
        self.progress.evaluation_due = True
        if self._is_logged("eval_loss"):
            self.progress.evaluation_due = False
            return
        try:
            self.values = held_out_loss(self.run, self._held_out, self._before_evaluation_batch).values(prefix="eval_")
        except _EvaluationCutShort:
            return
        if self.values:
            self._log(self.values)
        else:
            self.log.message("evaluation: no row of data.valid that was evaluated has a target, so there is no held-out loss")
        self.progress.evaluation_due = False

    def _before_evaluation_batch(self) -> None:
        self._beat("evaluation")
        if any_rank((self.signals.received,), device=self.run.platform.device)[0]:
            raise _EvaluationCutShort

    def _is_logged(self, name: str) -> bool:
        """Whether the log has this value for this step: a run may have been killed after an evaluation that was due on resume."""
        folder, found = self.run.config.logging.dir, False
        if folder and rank_of_environment() == 0 and (path := Path(folder) / METRICS_FILE).is_file():
            found = any(record["step"] == self.run.step and name in record for record in read_metrics(path))
        return any_rank((found,), device=self.run.platform.device)[0]

    def _start_save(self) -> None:
        if self.saver is None or self._saved_step == self.run.step:
            return
        self._finish_save()
        self._beat_while_saving()
        self.progress.unlogged = broadcast_from_first(self.log.unwritten)
        self.saver.start(self.progress)
        self._saved_step = self.run.step
        if not self.run.config.checkpoint.asynchronous:
            self._finish_save()

    def _finish_save(self) -> Path | None:
        """Wait for the save in progress and announce it. Its directory, or None if there is none."""
        if self.saver is None or not self.saver.is_active:
            return None
        self._beat_while_saving()
        final = self.saver.finish()
        self.log.message(f"saved {final}")
        self._beat("after a save")
        return final

    def _save_now(self) -> Path | None:
        """Make sure that the present state is on the disk. The newest checkpoint, or None if nothing is ever saved."""
        self._start_save()
        self._finish_save()
        return paths.latest_directory(Path(self.run.config.checkpoint.dir)) if self.saver is not None else None

    def _finish(self) -> None:
        """Save what is not saved yet; raise `LogError` or `StopRequested` if that is what ended the loop."""
        run = self.run
        is_stopped = any_rank((self.signals.received,), device=run.platform.device)[0]
        is_unfinished = run.step < run.config.training.steps or self.progress.evaluation_due
        saved = self._save_now()
        if summary := targets.summary(self.progress, steps=run.step):
            self.log.message(summary)
        raise_together(self.log.error(saved=saved))
        if is_stopped and is_unfinished:
            name = self.signals.name() or "a signal to another rank"
            raise StopRequested(
                f"stopped by {name} after step {run.step}; " + (f"saved {saved}" if saved else "nothing is saved")
            )


def _open_log(config: Config, *, resumed_step: int) -> RunLog:
    """The run's log. What rank 0 refuses is refused on every rank."""
    settings, total_steps = config.logging, config.training.steps
    log, error = None, None
    try:
        is_writer = rank_of_environment() == 0
        log = RunLog(
            settings, is_writer=is_writer, total_steps=total_steps, resumed_step=resumed_step, run_config=to_dict(config)
        )
    except DMTDError as refused:
        error = refused
    except OSError as refused:
        error = ConfigError(
            found=f"logging.dir: {refused}",
            required="a folder that can be written to",
            remedy="change its permissions, or choose another folder",
        )
    raise_together(error)
    assert log is not None
    return log


def _throughput(run: RunState, log: RunLog) -> Throughput:
    peak = peak_tflops(run.config, run.platform)
    if peak > 0:
        how = "measured now" if run.config.logging.measure_peak else "as logging.peak_tflops says"
        log.message(f"mfu is the share of {peak:.4g} TFLOP/s per process, {how}")
    return Throughput(run, peak_tflops=peak)


def _tell_slow_products(run: RunState, log: RunLog) -> None:
    if run.config.training.precision == "bf16" and not run.platform.is_cuda and not has_bf16_instructions():
        log.message("bf16 saves memory but no time on this processor, which has no instructions for it: products run in fp32")


def _tell_differences(config: Config, log: RunLog) -> None:
    directory = resume_directory(config)
    for difference in differences(config, saved_config(directory)) if directory is not None else []:
        log.message(f"differs: {difference}")


def run_training(
    config: Config, platform: Platform, signals: StopSignals | None = None, *, open_sources: OpenSources = open_corpora
) -> dict[str, float]:
    """The whole job: check, prepare, train, close. Rows are those of the configuration's corpora, or of `open_sources`.

    Raises `DMTDError`s for what the user can fix, and `StopRequested` after a save that one of `signals` asked for.
    """
    rank, world_size = rank_of_environment(), world_size_of_environment()
    config = with_bos(config)
    check(config, world_size=world_size, open_sources=open_sources)
    watchdog = Watchdog(limit_s=config.training.watchdog_s, rank=rank, world_size=world_size)
    watchdog.start()
    with contextlib.ExitStack() as held:
        held.callback(watchdog.stop)
        join(config, platform, watchdog)
        held.enter_context(locked_folders(config, watchdog))
        run, progress = build(config, platform, watchdog)
        is_resumed = resume_directory(config) is not None
        log = held.enter_context(_open_log(config, resumed_step=run.step if is_resumed else NOT_RESUMED))
        log.message(f"{config.cycle.variant} on {platform.describe()}, {world_size} processes")
        if run.step:
            is_done = run.step >= config.training.steps
            rest = f"; nothing is left to do: training.steps = {config.training.steps}" if is_done else ""
            log.message(f"resumed at step {run.step}{rest}")
        _tell_differences(config, log)
        _tell_slow_products(run, log)
        log.make_up(progress.unlogged)
        progress.unlogged = []
        trainer = Trainer(
            run,
            progress,
            log,
            _throughput(run, log),
            open_sources=open_sources,
            signals=signals or StopSignals(),
            watchdog=watchdog,
        )
        if trainer.saver is not None:
            held.callback(trainer.saver.abandon)
        return trainer.train()
