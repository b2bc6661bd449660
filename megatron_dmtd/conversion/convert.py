"""Conversions: a Hugging Face directory or GGUF file to a checkpoint, and a checkpoint to a directory.

Each checks everything that headers and configurations reveal before it reads or writes a weight, and then moves one tensor after
the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megatron_dmtd.config import Config, CycleConfig
from megatron_dmtd.config.validate import validate_cycle
from megatron_dmtd.conversion.gguf import gguf_file, write_as_hf_directory
from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.conversion.progress import tensor_bar
from megatron_dmtd.conversion.sources import Checkpoint, HFDirectory, Source, verified_meanwhile
from megatron_dmtd.conversion.tokenizer_files import GENERATION_FILE, check_mask, tokenizer_files
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.infra.directories import refuse_used
from megatron_dmtd.weights.checkpoint_files import TOKENIZER_FOLDER
from megatron_dmtd.weights.megatron_names import hf_specs, rules
from megatron_dmtd.weights.prefetch import read_ahead
from megatron_dmtd.weights.safetensors_files import SHARD_BYTES
from megatron_dmtd.weights.torch_dist import write_model_checkpoint


def import_hf(path: str | Path, output: str | Path, *, cycle: CycleConfig | None = None) -> Source:
    """Make a checkpoint, to start training from, of a Qwen3, Llama or DMTD directory, or of a GGUF file.

    `cycle`: the method that an ordinary decoder is to learn; None keeps that of the directory (`vanilla` for an ordinary one).
    Returns the result. Raises `ConversionError`, `ConfigError` or `DataError`, before anything is written, if the model cannot be
    represented exactly, or the MASK of its cycles is an ordinary token.
    """
    output = Path(output)
    refuse_used(output, error=ConversionError)
    gguf = gguf_file(path)
    if gguf is None:
        source = HFDirectory(path)
        _import(source, output, cycle=cycle, tokenizer_home=source.directory.resolve())
        return Checkpoint(output, verify=False)
    with tempfile.TemporaryDirectory() as folder:
        write_as_hf_directory(gguf, Path(folder))
        _import(HFDirectory(folder), output, cycle=cycle, tokenizer_home=output.resolve() / TOKENIZER_FOLDER)
    return Checkpoint(output, verify=False)


def _import(source: HFDirectory, output: Path, *, cycle: CycleConfig | None, tokenizer_home: Path) -> None:
    """`tokenizer_home`: the folder that the checkpoint names as its tokenizer's; if inside the checkpoint, it is copied there."""
    cycle = _cycle_of_import(source, cycle)
    validate_cycle(cycle, source.model)
    check_mask(cycle, source.directory)
    config = Config(model=source.model, cycle=cycle)
    carried: list[Path] = []
    if tokenizer_files(source.directory):
        config = replace(config, data=replace(config.data, tokenizer=str(tokenizer_home)))
        if tokenizer_home != source.directory.resolve():
            settings = source.directory / GENERATION_FILE
            carried = tokenizer_files(source.directory) + ([settings] if settings.is_file() else [])
    specs = source.megatron_specs()
    with tensor_bar("importing", specs.values()) as bar:

        def read(name: str) -> torch.Tensor:
            bar.update(specs[name].num_bytes)
            return source.megatron(name)

        write_model_checkpoint(output, specs, read, config, tokenizer=carried)


def _cycle_of_import(source: HFDirectory, wanted: CycleConfig | None) -> CycleConfig:
    if wanted is None:
        return source.cycle
    if not source.cycle.is_vanilla:
        raise ConversionError(
            found=f"{source.directory}, which has cycles ({source.cycle.variant}), and settings for other cycles",
            required="such settings only for an ordinary decoder, which has no cycles",
            remedy="import without them; training from these weights (checkpoint.init_from) may use any variant",
        )
    return wanted


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
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> Source:
    """Make a Hugging Face directory from a checkpoint, or from the newest one of a run. Returns the result.

    `as_vanilla`: as an ordinary Qwen3 or Llama decoder, whatever the checkpoint was trained as. `dtype`: None keeps the types.
    `verify`: compare the checkpoint's bytes with its checksums, the weights while the directory is built aside. Raises
    `CheckpointError`, `ConversionError` or `DataError` if a file is damaged, not every tensor is accounted for, or the MASK is an
    ordinary token of the tokenizer; then there is no directory.
    """
    output = Path(output)
    refuse_used(output, error=ConversionError)
    with verified_meanwhile(checkpoint, verify=verify) as (source, wait_for_verdict):
        cycle = CycleConfig(variant="vanilla") if as_vanilla else source.cycle
        fields = write_fields(ModelDescription(model=source.model, cycle=cycle))
        tokenizer_dir = _tokenizer_of_export(source.config, tokenizer_dir)
        check_mask(cycle, tokenizer_dir)
        specs = hf_specs(source.description.decoder, source.stored, dtype=dtype)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            with tensor_bar("exporting", specs.values()) as bar:
                for name, tensor in _cast(source, dtype):
                    yield name, tensor
                    bar.update(specs[name].num_bytes)
            wait_for_verdict()

        write_hf_directory(
            output,
            fields=fields,
            specs=specs,
            tensors=tensors(),
            tokenizer_dir=tokenizer_dir,
            add_bos=source.config.data.add_bos,
            shard_bytes=shard_bytes,
        )
    return HFDirectory(output)


def _cast(source: Checkpoint, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    table = {rule.megatron_name: rule for rule in rules(source.description.decoder)}
    for megatron_name, whole in read_ahead(table, source.megatron):
        for name, tensor in table[megatron_name].split(whole):
            yield name, tensor.to(dtype or tensor.dtype)
