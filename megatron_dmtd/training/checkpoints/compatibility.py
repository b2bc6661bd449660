"""Whether a run with a configuration may resume from a checkpoint, setting by setting. No torch.

Each setting that differs is named, with whether the difference is allowed and why. The setting itself states the rule
(`config/metadata.py`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.config import Config
from megatron_dmtd.config.metadata import Setting, settings
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training.checkpoints.initial import Initial
from megatron_dmtd.weights.checkpoint_files import saved_config

#: how documents begin; `auto`: no manifest has said it, as in runs of earlier versions
_BOS, _UNDECIDED = "data.add_bos", "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One setting that differs between a checkpoint and a run."""

    setting: Setting
    saved: object
    wanted: object

    refused: str
    """Why it may not differ; empty where it may."""

    def __str__(self) -> str:
        text = f"{self.setting.key} = {self.saved} in the checkpoint, {self.wanted} in this run"
        return f"{text} ({self.refused or f'allowed: {self.setting.resume.why}'})"


def _why_refused(setting: Setting, saved: Config, wanted: Config) -> str:
    """Why a run may not set it differently from its checkpoint; empty where it may."""
    rule = setting.resume
    if setting.key == _BOS and _UNDECIDED not in (setting.value_in(saved), setting.value_in(wanted)):
        return "all documents of a run begin alike"
    if not rule.may_change:
        return rule.why
    if any(other.value_in(wanted) for other in settings(Config) if other.key == rule.not_with):
        return rule.why_not_with
    needed = [other for other in settings(Config) if other.key == rule.only_with]
    return "" if all(other.value_in(wanted) for other in needed) else rule.why_only_with


def differences(wanted: Config, saved: Config) -> list[Difference]:
    """Every setting in which two configurations differ, in the order of the sections."""
    found = []
    for setting in settings(Config):
        old, new = setting.value_in(saved), setting.value_in(wanted)
        if new != old:
            found.append(Difference(setting=setting, saved=old, wanted=new, refused=_why_refused(setting, saved, wanted)))
    return found


def _refuse(refused: list[Difference], allowed: list[Difference], step_directory: Path, *, remedy: str) -> None:
    if refused:
        listed = "; ".join(str(difference) for difference in [*refused, *allowed])
        raise CheckpointError(
            found=f"{step_directory} is of another run: {listed}", required="the same model and data", remedy=remedy
        )


def check_resumable(config: Config, step_directory: Path) -> Config:
    """The configuration that wrote a checkpoint. Raises `CheckpointError`, field by field, if this run may not resume from it."""
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


def check_weights(config: Config, source: Initial) -> None:
    """Raise `CheckpointError` if the weights of a model on disk do not fit. The method may differ: it adds no parameters."""
    found = differences(config, dataclasses.replace(config, model=source.model))
    refused = [difference for difference in found if difference.refused]
    _refuse(refused, [], source.directory, remedy="leave out or correct the model's settings, or name another checkpoint")
