"""Live weights: one stream of (name, tensor) under Hugging Face's names, whatever holds them.

A directory, a checkpoint and the ranks of a running training give the same stream: each tensor of the decoder once, whole, one at
a time. `Engine.update_weights` and an exporter take it. Values are never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.weights.checkpoint_files import saved_config
from megatron_dmtd.weights.hf_directory import open_directory
from megatron_dmtd.weights.megatron_names import check_megatron, rules
from megatron_dmtd.weights.torch_dist import CheckpointTensors

WeightStream = Iterator[tuple[str, torch.Tensor]]


def stream_directory(directory: str | Path) -> WeightStream:
    """The weights of a Hugging Face directory. Raises as `hf_directory.open_directory`, before the first tensor."""
    return iter(open_directory(directory))


def stream_checkpoint(step_directory: str | Path) -> WeightStream:
    """The weights of a checkpoint's step directory, of any layout.

    Raises `CheckpointError` or `ConversionError` before the first tensor, if the checkpoint cannot be read or its tensors are not
    exactly those of its model. Its checksums are not compared.
    """
    decoder = decoder_of(saved_config(step_directory).model)
    tensors = CheckpointTensors(step_directory)
    check_megatron(decoder, tensors.specs)
    return (part for rule in rules(decoder) for part in rule.split(tensors.read(rule.megatron_name)))
