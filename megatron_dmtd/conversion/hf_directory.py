"""Writes a Hugging Face model directory: weights, configuration, tokenizer, and for DMTD models the code of the model.

The bytes depend only on the arguments and the code: whatever layout a checkpoint was trained in, its export is the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dmtd.conversion.tokenizer_files import (
    GENERATION_FILE,
    begin_texts,
    generation_settings,
    special_ids,
    tokenizer_files,
)
from megatron_dmtd.data.corpora.bos import AddBos
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.hf.configuration_dmtd_qwen3 import DMTDQwen3Config
from megatron_dmtd.hf.remote_code import AUTO_MAP, code_files
from megatron_dmtd.infra.directories import new_directory
from megatron_dmtd.weights.safetensors_files import SHARD_BYTES, write_weights
from megatron_dmtd.weights.specs import TensorSpec


def write_hf_directory(
    directory: str | Path,
    *,
    fields: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer_dir: str | Path | None = None,
    add_bos: AddBos = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory, completely or not at all.

    Args:
        directory: The target; absent or empty.
        fields: Those of `config.json`. With our own `model_type`, the code is included.
        specs: Every tensor, in order.
        tensors: The tensors, in the same order.
        tokenizer_dir: Folder whose tokenizer and generation settings are copied.
        add_bos: Whether that tokenizer is to begin texts with BOS; `auto`: as it does.
        shard_bytes: Largest size of a weight file, in bytes; a single larger tensor still gets a file of its own.

    Raises:
        ConversionError: The target is not empty, or the disk is full.
    """
    with_code = fields["model_type"] == DMTDQwen3Config.model_type
    generation = generation_settings(tokenizer_dir)
    copied = {path.name: path for path in (tokenizer_files(tokenizer_dir) if tokenizer_dir else [])}
    with new_directory(Path(directory), error=ConversionError, num_bytes=sum(spec.num_bytes for spec in specs.values())) as aside:
        write_weights(aside, specs, tensors, shard_bytes=shard_bytes)
        complete = dict(fields) | special_ids(generation) | _stored_type(specs) | ({"auto_map": AUTO_MAP} if with_code else {})
        _write_json(aside / "config.json", dict(sorted(complete.items())))
        _write_json(aside / GENERATION_FILE, generation)
        for name, path in (copied | (code_files() if with_code else {})).items():
            shutil.copyfile(path, aside / name)
        if copied:
            begin_texts(aside, add_bos)


def _stored_type(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The type that a loader uses by default. Omitted for mixed weights, for which no single one is right."""
    types = {spec.dtype for spec in specs.values()}
    return {"torch_dtype": str(types.pop()).removeprefix("torch.")} if len(types) == 1 else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
