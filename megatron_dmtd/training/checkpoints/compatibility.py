"""Whether a configuration may go on from a checkpoint, field by field. No torch.

Each field of the configuration that differs is named, with whether the difference is allowed and why. A new setting has to be
entered in one of the two tables: a test counts them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.config import Config, from_yaml
from megatron_dmtd.errors import CheckpointError, ConfigError
from megatron_dmtd.training.checkpoints import paths

_HOW_IT_RUNS = "says how the run works, not what it computes"
_RESHARDED = "state is resharded: the same run up to rounding"
_SCHEDULE = "the schedule follows the new value from here on"
_MEASURES = "only measures"
_MADE = "the weights are already made"
_FILES = "the same corpora elsewhere; other ones are refused when their rows are counted"

#: why a field may differ
ALLOWED = {
    "model.max_position_embeddings": "says what the model is meant for, not what it is",
    "model.family": "names the architecture of exports; nothing is computed by it",
    "model.init_std": _MADE,
    "parallel.tensor": _RESHARDED,
    "parallel.pipeline": _RESHARDED,
    "parallel.virtual_stages": _RESHARDED,
    "parallel.stage_layers": _RESHARDED,
    "parallel.context": _RESHARDED,
    "parallel.sequence_parallel": _RESHARDED,
    "parallel.overlap_grad_reduce": _HOW_IT_RUNS,
    "parallel.overlap_param_gather": _HOW_IT_RUNS,
    "parallel.recompute": _HOW_IT_RUNS,
    "parallel.attention_backend": _RESHARDED,
    "parallel.timeout_s": _HOW_IT_RUNS,
    "data.train": _FILES,
    "data.valid": _MEASURES,
    "data.tokenizer": "only copied into exports",
    "data.cache_dir": _HOW_IT_RUNS,
    "data.prefetch_batches": _HOW_IT_RUNS,
    "optimizer.lr": _SCHEDULE,
    "optimizer.min_lr": _SCHEDULE,
    "optimizer.warmup_steps": _SCHEDULE,
    "optimizer.decay": _SCHEDULE,
    "optimizer.decay_steps": _SCHEDULE,
    "optimizer.wsd_decay_steps": _SCHEDULE,
    "optimizer.wsd_decay_style": _SCHEDULE,
    "optimizer.weight_decay": _SCHEDULE,
    "optimizer.beta1": _SCHEDULE,
    "optimizer.beta2": _SCHEDULE,
    "optimizer.eps": _SCHEDULE,
    "optimizer.clip_grad": _SCHEDULE,
    "training.steps": _SCHEDULE,
    "training.micro_batch_size": _RESHARDED,
    "training.global_batch_size": "rows are counted, not batches: no row is lost or repeated",
    "training.rampup_batch_size": "rows are counted, not batches: no row is lost or repeated",
    "training.precision": "weights and moments are kept in fp32 in both",
    "training.seed": _MADE,
    "training.eval_interval": _MEASURES,
    "training.eval_batches": _MEASURES,
    "training.deterministic": _HOW_IT_RUNS,
    "training.max_bad_steps": _HOW_IT_RUNS,
    "training.watchdog_s": _HOW_IT_RUNS,
    "checkpoint.dir": _HOW_IT_RUNS,
    "checkpoint.interval": _HOW_IT_RUNS,
    "checkpoint.keep_last": _HOW_IT_RUNS,
    "checkpoint.keep_every": _HOW_IT_RUNS,
    "checkpoint.asynchronous": _HOW_IT_RUNS,
    "checkpoint.resume": _HOW_IT_RUNS,
    "checkpoint.init_from": "a run that goes on does not start again",
    "logging.dir": _HOW_IT_RUNS,
    "logging.interval": _HOW_IT_RUNS,
    "logging.wandb_project": _HOW_IT_RUNS,
    "logging.run_name": _HOW_IT_RUNS,
    "logging.peak_tflops": _MEASURES,
    "logging.measure_peak": _MEASURES,
    "logging.progress": _HOW_IT_RUNS,
    "logging.spike_deviations": _MEASURES,
}

_SHAPE = "another model"
_METHOD = "another method"
_OBJECTIVE = "another objective: what is logged and remembered differs"
_ROWS = "other rows, or the same in another order"

#: why a field may not differ
REFUSED = {
    "model.num_layers": _SHAPE,
    "model.hidden_size": _SHAPE,
    "model.intermediate_size": _SHAPE,
    "model.num_attention_heads": _SHAPE,
    "model.num_key_value_heads": _SHAPE,
    "model.head_dim": _SHAPE,
    "model.vocab_size": _SHAPE,
    "model.rope_theta": _SHAPE,
    "model.rms_norm_eps": _SHAPE,
    "model.tie_word_embeddings": _SHAPE,
    "model.qk_norm": _SHAPE,
    "model.rope_scaling": _SHAPE,
    "model.qkv_bias": _SHAPE,
    "model.output_bias": _SHAPE,
    "model.sliding_window": _SHAPE,
    "model.windowed_layers": _SHAPE,
    "cycle.variant": _METHOD,
    "cycle.num_parallel_layers": _METHOD,
    "cycle.cycle_length": _METHOD,
    "cycle.mask_token_id": _METHOD,
    "parallel.distributed_optimizer": "Megatron stores the two kinds of optimizer in forms that do not load each other",
    "data.train_weights": _ROWS,
    "data.seq_length": _ROWS,
    "data.pad_token_id": _ROWS,
    "data.shuffle_seed": _ROWS,
    "data.packing": _ROWS,
    "training.objective": _OBJECTIVE,
    "training.freeze_embeddings": "the optimizer's state would lack the table, or hold one that nobody trains",
}

#: the section that must agree for weights alone. The method may differ: it adds no parameters.
_WEIGHTS = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One field that a checkpoint and a run set differently."""

    field: str
    saved: object
    wanted: object

    refused: str
    """Why it may not differ; empty where it may."""

    def __str__(self) -> str:
        text = f"{self.field} = {self.saved} in the checkpoint, {self.wanted} in this run"
        return f"{text} ({self.refused or f'allowed: {ALLOWED[self.field]}'})"


def _why_refused(field: str, wanted: Config) -> str:
    """Why a run may not set a field differently from its checkpoint; empty where it may."""
    if field == "training.precision" and not wanted.parallel.distributed_optimizer:
        return "without parallel.distributed_optimizer Megatron stores the precisions in forms that do not load each other"
    return "" if field in ALLOWED else REFUSED.get(field, "no rule says that it may differ")


def differences(wanted: Config, saved: Config) -> list[Difference]:
    """Every field in which two configurations differ, in the order of the sections."""
    found = []
    for section in dataclasses.fields(Config):
        ours, theirs = getattr(wanted, section.name), getattr(saved, section.name)
        for item in dataclasses.fields(ours):
            field = f"{section.name}.{item.name}"
            new, old = getattr(ours, item.name), getattr(theirs, item.name)
            if new != old:
                found.append(Difference(field=field, saved=old, wanted=new, refused=_why_refused(field, wanted)))
    return found


def saved_config(step_directory: Path) -> Config:
    """The configuration that wrote a checkpoint. Raises `CheckpointError` if it cannot be read."""
    path = step_directory / paths.CONFIG_FILE
    try:
        return from_yaml(path)
    except ConfigError as error:
        raise CheckpointError(
            found=f"{path}: {error.found}", required="the configuration saved with the checkpoint", remedy=error.remedy
        ) from error


def _refuse(refused: list[Difference], allowed: list[Difference], step_directory: Path, *, remedy: str) -> None:
    if refused:
        listed = "; ".join(str(difference) for difference in [*refused, *allowed])
        raise CheckpointError(
            found=f"{step_directory} is of another run: {listed}", required="the same model and data", remedy=remedy
        )


def check_resumable(config: Config, step_directory: Path) -> Config:
    """The configuration that wrote a checkpoint. Raises `CheckpointError`, field by field, if this run may not go on from it."""
    saved = saved_config(step_directory)
    found = differences(config, saved)
    refused = [difference for difference in found if difference.refused]
    _refuse(
        refused,
        [difference for difference in found if not difference.refused],
        step_directory,
        remedy="correct the settings that are not marked as allowed, choose another checkpoint.dir, "
        "or start from its weights with checkpoint.init_from",
    )
    return saved


def check_weights(config: Config, step_directory: Path) -> None:
    """Raise `CheckpointError` if a checkpoint's weights do not fit this model. The method may differ: it adds no parameters."""
    found = differences(config, saved_config(step_directory))
    refused = [d for d in found if d.field.startswith(f"{_WEIGHTS}.") and d.refused]
    _refuse(refused, [], step_directory, remedy="correct the model's settings, or name another checkpoint")
