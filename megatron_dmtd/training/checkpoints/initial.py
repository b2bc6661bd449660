"""Where a new run's weights come from (`checkpoint.init_from`): a checkpoint, a run, or a Hugging Face directory; and the shape
of the model, which settings need not repeat. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from megatron_dmtd.config import Config, ModelConfig, stated_keys, to_config
from megatron_dmtd.config.metadata import settings
from megatron_dmtd.errors import CheckpointError, ConfigError, ModelError
from megatron_dmtd.families import read_directory
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.weights.checkpoint_files import CONFIG_FILE, METADATA_FILE, saved_config

#: settings without which nothing can be said about a model
_CORE = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Initial:
    """A model on disk from whose weights a run starts."""

    directory: Path
    """The checkpoint's own directory, or the Hugging Face directory."""
    model: ModelConfig
    is_hugging_face: bool


def find_initial(path: str | Path) -> Initial:
    """The model that `checkpoint.init_from` means.

    Raises `CheckpointError` if there is none, `ModelError` if it is a Hugging Face directory of a model that is not supported.
    """
    directory = Path(path)
    of_a_run = (METADATA_FILE, CONFIG_FILE, paths.LATEST_FILE)
    if (directory / "config.json").is_file() and not any((directory / name).exists() for name in of_a_run):
        return Initial(directory=directory, model=read_directory(directory).model, is_hugging_face=True)
    step_directory = paths.find_step_directory(path)
    return Initial(directory=step_directory, model=saved_config(step_directory).model, is_hugging_face=False)


def run_config(parser: ArgumentParser, namespace: Any, arguments: Sequence[str] | None = None) -> Config:
    """The configuration that `parser` made of arguments, with the shape of `init_from`. Raises as `with_shape`."""
    config = to_config(namespace)
    return with_shape(config, stated_keys(parser, arguments)) if config.checkpoint.init_from else config


def with_shape(config: Config, stated: Collection[str]) -> Config:
    """The configuration with every setting of `model` that is not `stated` taken from where the weights come from.

    That is the run's own newest checkpoint if it has one, and else `checkpoint.init_from`; without the latter nothing changes.
    `stated`: dotted keys that YAML files and options set.

    Raises `ConfigError` if stated settings are of another model than that of `init_from`, and as `find_initial` if there is none
    and the stated settings do not make a model by themselves.
    """
    if not config.checkpoint.init_from:
        return config
    newest = paths.latest_directory(Path(config.checkpoint.dir)) if _may_resume(config) else None
    if newest is not None:  # whether it may be resumed is said with all other settings that differ
        return _filled(config, stated, saved_config(newest).model)
    try:
        source = find_initial(config.checkpoint.init_from)
    except (CheckpointError, ModelError):
        if all(f"model.{name}" in stated for name in _CORE):
            return config  # before its weights are there, or whole, a plan can be made; training refuses
        raise
    _refuse_another_model(config, stated, source)
    return _filled(config, stated, source.model)


def _may_resume(config: Config) -> bool:
    return bool(config.checkpoint.dir) and config.checkpoint.resume


def _refuse_another_model(config: Config, stated: Collection[str], source: Initial) -> None:
    found, required = [], []
    for setting in settings(ModelConfig):
        key, wanted, theirs = f"model.{setting.key}", setting.value_in(config.model), setting.value_in(source.model)
        if key in stated and wanted != theirs and not setting.resume.may_change:
            found.append(f"{key} = {wanted}")
            required.append(f"{key} = {theirs}")
    if found:
        raise ConfigError(
            found=f"{', '.join(found)} in the settings of this run",
            required=f"{', '.join(required)}, as in {source.directory}, from whose weights it is to start",
            remedy="leave these settings out (the model's shape is taken from checkpoint.init_from), or name another model there",
        )


def _filled(config: Config, stated: Collection[str], source: ModelConfig) -> Config:
    return dataclasses.replace(config, model=_merged(config.model, source, stated, prefix="model."))


def _merged(wanted: Any, source: Any, stated: Collection[str], *, prefix: str) -> Any:
    """`wanted`, with the fields of `source` that are not stated."""
    values = {}
    for item in dataclasses.fields(wanted):
        own, theirs = getattr(wanted, item.name), getattr(source, item.name)
        if dataclasses.is_dataclass(own):
            values[item.name] = _merged(own, theirs, stated, prefix=f"{prefix}{item.name}.")
        else:
            values[item.name] = own if f"{prefix}{item.name}" in stated else theirs
    return dataclasses.replace(wanted, **values)
