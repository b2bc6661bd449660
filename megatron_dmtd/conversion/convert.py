"""The three conversions that users ask for: a Hugging Face directory in, a checkpoint out, and what a directory holds.

Each checks everything that headers and configurations can tell before it reads or writes a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_dmtd.config import Config, CycleConfig, ModelConfig
from megatron_dmtd.config.validate import validate_cycle, validate_model
from megatron_dmtd.conversion.checkpoint_io import (
    read_checkpoint_config,
    read_model_specs,
    read_model_tensors,
    write_model_checkpoint,
)
from megatron_dmtd.conversion.directories import refuse_used
from megatron_dmtd.conversion.hf_config import from_hf_config, read_hf_fields, to_hf_config
from megatron_dmtd.conversion.hf_files import read_hf_specs, read_hf_tensors, tokenizer_files, write_hf_directory
from megatron_dmtd.conversion.rules import TensorSpec, check_foreign, check_own, from_hf, to_hf
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.hf.configuration_dmtd_qwen3 import DMTDQwen3Config
from megatron_dmtd.hf.export import save_export
from megatron_dmtd.training.paths import find_step_directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a model directory or a checkpoint holds."""

    kind: str
    """Its format, in words."""
    directory: Path
    model: ModelConfig
    cycle: CycleConfig
    tensors: dict[str, TensorSpec]

    @property
    def num_parameters(self) -> int:
        """Parameters as stored; a checkpoint's vocabulary is padded."""
        return sum(math.prod(spec.shape) for spec in self.tensors.values())


def _cycle_of_import(found: CycleConfig, wanted: CycleConfig | None, hf_directory: Path) -> CycleConfig:
    if wanted is None:
        return found
    if not found.is_vanilla:
        raise ConversionError(
            found=f"{hf_directory} with cycles of its own ({found.variant}), and settings for other ones",
            required="settings only for an ordinary decoder, which has none",
            remedy="import without them; training from these weights (checkpoint.init_from) may use any variant",
        )
    return wanted


def import_hf(hf_directory: str | Path, output: str | Path, *, cycle: CycleConfig | None = None) -> Contents:
    """Make a checkpoint, to start training from, of a Qwen3, Llama or DMTD directory.

    `cycle`: the method that an ordinary decoder is to learn; None keeps what the directory says (`vanilla` for an ordinary one).
    Raises `ConversionError` or `ConfigError`, before anything is written, if the model cannot be represented exactly.
    """
    hf_directory, output = Path(hf_directory), Path(output)
    refuse_used(output)
    model, found = from_hf_config(read_hf_fields(hf_directory))
    cycle = _cycle_of_import(found, cycle, hf_directory)
    validate_cycle(cycle, model)
    check_foreign(model, read_hf_specs(hf_directory))
    config = Config(model=model, cycle=cycle)
    if tokenizer_files(hf_directory):
        config = replace(config, data=replace(config.data, tokenizer=str(hf_directory.resolve())))
    write_model_checkpoint(output, from_hf(model, read_hf_tensors(hf_directory)), config)
    return inspect(output)


def _tokenizer_of_export(config: Config, tokenizer_dir: str | Path | None) -> str | Path | None:
    chosen = tokenizer_dir or config.data.tokenizer or None
    if chosen is not None and not tokenizer_files(chosen):
        raise ConversionError(
            found=f"no tokenizer in {chosen}",
            required="the directory of a Hugging Face tokenizer",
            remedy="name it (--tokenizer); the checkpoint's data.tokenizer is used if none is named",
        )
    return chosen


def export_hf(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    as_vanilla: bool = False,
    tokenizer_dir: str | Path | None = None,
) -> Contents:
    """Make a Hugging Face directory of a checkpoint, or of the newest one of a run.

    `as_vanilla`: as an ordinary Qwen3 or Llama decoder, whatever the checkpoint was trained as. `dtype`: None keeps the type.
    Raises `CheckpointError` or `ConversionError`, before anything is written, if not every tensor is accounted for.
    """
    output = Path(output)
    refuse_used(output)
    step_directory = find_step_directory(checkpoint)
    config = read_checkpoint_config(step_directory)
    tokenizer_dir = _tokenizer_of_export(config, tokenizer_dir)
    check_own(config.model, read_model_specs(step_directory))
    tensors = to_hf(config.model, read_model_tensors(step_directory))
    cycle = CycleConfig(variant="vanilla") if as_vanilla else config.cycle
    fields = to_hf_config(config.model, cycle)
    if cycle.is_vanilla:
        write_hf_directory(output, fields=fields, tensors=tensors, tokenizer_dir=tokenizer_dir, dtype=dtype)
    else:
        for name in ("model_type", "architectures", "rope_theta"):
            del fields[name]
        save_export(output, config=DMTDQwen3Config(**fields), tensors=tensors, tokenizer_dir=tokenizer_dir, dtype=dtype)
    return inspect(output)


def inspect(path: str | Path) -> Contents:
    """What `path` holds, from configurations and headers alone; every tensor is checked against the configuration.

    Raises `ConversionError` or `CheckpointError` if it is neither format or not every tensor is accounted for.
    """
    directory = Path(path)
    if (directory / "config.json").is_file():
        model, cycle = from_hf_config(read_hf_fields(directory))
        specs = read_hf_specs(directory)
        check_foreign(model, specs)
        return Contents(kind="Hugging Face directory", directory=directory, model=model, cycle=cycle, tensors=specs)
    step_directory = find_step_directory(directory)
    config = read_checkpoint_config(step_directory)
    validate_model(config.model)
    specs = read_model_specs(step_directory)
    check_own(config.model, specs)
    return Contents(kind="training checkpoint", directory=step_directory, model=config.model, cycle=config.cycle, tensors=specs)
