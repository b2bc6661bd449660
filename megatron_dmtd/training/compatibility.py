"""Whether a configuration may go on from a checkpoint, field by field. No torch.

Each field of the configuration that differs is named, with whether the difference is allowed and why; a field that no rule names
is refused, so that a new setting cannot be forgotten here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.config import Config, from_yaml
from megatron_dmtd.errors import CheckpointError, ConfigError
from megatron_dmtd.training import paths

_HOW_IT_RUNS = "says how the run works, not what it computes"
_RESHARDED = "state is resharded: the same run up to rounding"
_SCHEDULE = "the schedule follows the new value from here on"
_FILES = "the same corpora elsewhere; other ones are refused when their rows are counted"

#: why a difference is allowed, by section or by field; the field wins
ALLOWED = {
    "parallel": _RESHARDED,
    "parallel.timeout_s": _HOW_IT_RUNS,
    "optimizer": _SCHEDULE,
    "checkpoint": _HOW_IT_RUNS,
    "logging": _HOW_IT_RUNS,
    "model.init_std": "the weights are already made",
    "model.max_position_embeddings": "says what the model is meant for, not what it is",
    "data.train": _FILES,
    "data.valid": "only measures",
    "data.tokenizer": "only copied into exports",
    "data.cache_dir": _HOW_IT_RUNS,
    "data.prefetch_batches": _HOW_IT_RUNS,
    "training.steps": _SCHEDULE,
    "training.micro_batch_size": _RESHARDED,
    "training.global_batch_size": "rows are counted, not batches: no row is lost or repeated",
    "training.rampup_batch_size": "rows are counted, not batches: no row is lost or repeated",
    "training.precision": "weights and moments are kept in fp32 in both",
    "training.seed": "the weights are already made",
    "training.eval_interval": "only measures",
    "training.eval_batches": "only measures",
    "training.deterministic": _HOW_IT_RUNS,
    "training.max_bad_steps": _HOW_IT_RUNS,
    "training.watchdog_s": _HOW_IT_RUNS,
}

#: fields that must agree for weights alone: the shape of the model. The method may differ: it adds no parameters.
_SHAPE = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One field that a checkpoint and a run set differently."""

    field: str
    saved: object
    wanted: object
    allowed: str
    """Why it may differ; empty where it may not."""

    def __str__(self) -> str:
        text = f"{self.field} = {self.saved} in the checkpoint, {self.wanted} in this run"
        return f"{text} (allowed: {self.allowed})" if self.allowed else text


def differences(wanted: Config, saved: Config) -> list[Difference]:
    """Every field in which two configurations differ, in the order of the sections."""
    found = []
    for section in dataclasses.fields(Config):
        ours, theirs = getattr(wanted, section.name), getattr(saved, section.name)
        for item in dataclasses.fields(ours):
            field = f"{section.name}.{item.name}"
            new, old = getattr(ours, item.name), getattr(theirs, item.name)
            if new != old:
                allowed = ALLOWED.get(field) or ALLOWED.get(section.name, "")
                found.append(Difference(field=field, saved=old, wanted=new, allowed=allowed))
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
    refused = [difference for difference in found if not difference.allowed]
    _refuse(
        refused,
        [difference for difference in found if difference.allowed],
        step_directory,
        remedy="correct the settings that are not marked as allowed, choose another checkpoint.dir, "
        "or start from its weights with checkpoint.init_from",
    )
    return saved


def check_weights(config: Config, step_directory: Path) -> None:
    """Raise `CheckpointError` if a checkpoint's weights do not fit this model. The method may differ: it adds no parameters."""
    found = differences(config, saved_config(step_directory))
    refused = [d for d in found if d.field.startswith(f"{_SHAPE}.") and not d.allowed]
    _refuse(refused, [], step_directory, remedy="correct the model's settings, or name another checkpoint")
