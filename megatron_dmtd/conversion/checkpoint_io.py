"""Model weights of a training checkpoint, read and written in one process: no GPU, no process group, no Megatron.

A checkpoint (see `training/paths.py`) is a `torch_dist` directory: PyTorch's distributed format with Megatron's `common.pt` and
`metadata.json`, written last; and beside it `config.yaml`, the whole configuration.

In the files the tensors of all layers are one tensor, `decoder.layers.<name>` with the layers as first axis; here they are
apart, `decoder.layers.<i>.<name>`. Optimizer state and objects other than tensors are left alone. Tensors must fit in memory.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dmtd.config import Config, from_yaml, to_yaml
from megatron_dmtd.conversion.directories import built_aside
from megatron_dmtd.conversion.rules import TensorSpec, check_own, spec_of
from megatron_dmtd.errors import CheckpointError, ConfigError, ConversionError
from megatron_dmtd.training.paths import CONFIG_FILE, METADATA_FILE

_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_LAYERS = "decoder.layers."
#: optimizer state, also that of chained optimizers
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.")


def read_checkpoint_config(step_directory: str | Path) -> Config:
    """The configuration saved with a checkpoint. Raises `CheckpointError` if it is absent or not of this version."""
    path = Path(step_directory) / CONFIG_FILE
    try:
        return from_yaml(path)
    except ConfigError as error:
        raise CheckpointError(
            found=f"{path}: {error.found}", required="the configuration saved with the checkpoint", remedy=error.remedy
        ) from error


def _damaged(directory: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        found=f"{directory} cannot be read: {type(error).__name__}: {error}",
        required="a whole checkpoint",
        remedy="use another step, or copy the checkpoint again",
    )


#: what torch raises for absent, cut or scrambled files. CheckpointException is a BaseException.
_READ_ERRORS = (CheckpointException, OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError)


def _stored_specs(directory: Path) -> dict[str, TensorSpec]:
    """Spec of each model tensor as the file has it, layers stacked."""
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
    except _READ_ERRORS as error:
        raise _damaged(directory, error) from error
    return {
        key: TensorSpec(tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not _NOT_MODEL.match(key)
    }


def _is_stacked(key: str) -> bool:
    return key.startswith(_LAYERS) and not key.removeprefix(_LAYERS).split(".")[0].isdigit()


def _layer_key(key: str, layer: int) -> str:
    return f"{_LAYERS}{layer}.{key.removeprefix(_LAYERS)}"


def read_model_specs(step_directory: str | Path) -> dict[str, TensorSpec]:
    """Shape and type of each model tensor, one per layer, from the metadata alone. Raises `CheckpointError` if unreadable."""
    specs: dict[str, TensorSpec] = {}
    for key, spec in _stored_specs(Path(step_directory)).items():
        if _is_stacked(key):
            specs |= {_layer_key(key, layer): TensorSpec(spec.shape[1:], spec.dtype) for layer in range(spec.shape[0])}
        else:
            specs[key] = spec
    return specs


def read_model_tensors(step_directory: str | Path) -> dict[str, torch.Tensor]:
    """The model's whole tensors in CPU memory, one per layer, as they are stored. Raises `CheckpointError` if unreadable.

    The format has no checksums: damage inside a tensor's bytes goes unseen.
    """
    directory = Path(step_directory)
    stored = {key: torch.empty(spec.shape, dtype=spec.dtype) for key, spec in _stored_specs(directory).items()}
    try:
        with warnings.catch_warnings():
            # torch notes at each call that it runs in one process, which is what we ask for
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            dcp.load(stored, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    except _READ_ERRORS as error:
        raise _damaged(directory, error) from error
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        if _is_stacked(key):
            tensors |= {_layer_key(key, layer): part for layer, part in enumerate(tensor)}
        else:
            tensors[key] = tensor
    return tensors


def _stack_layers(tensors: Mapping[str, torch.Tensor], *, num_layers: int) -> dict[str, Any]:
    stacked: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not name.startswith(_LAYERS):
            stacked[name] = tensor
        elif name.startswith(f"{_LAYERS}0."):
            suffix = name.removeprefix(f"{_LAYERS}0.")
            stacked[_LAYERS + suffix] = torch.stack([tensors[f"{_LAYERS}{layer}.{suffix}"] for layer in range(num_layers)])
    return stacked


def _check_stackable(tensors: Mapping[str, torch.Tensor], *, num_layers: int) -> None:
    """All layers of a tensor must have one type: stacking would change the others."""
    faults = []
    for name in tensors:
        if name.startswith(f"{_LAYERS}0."):
            suffix = name.removeprefix(f"{_LAYERS}0.")
            types = {str(tensors[f"{_LAYERS}{layer}.{suffix}"].dtype) for layer in range(num_layers)}
            if len(types) > 1:
                faults.append(f"{_LAYERS}*.{suffix} mixes {' and '.join(sorted(types))}")
    if faults:
        raise ConversionError(
            found="; ".join(faults), required="one type for all layers of a tensor", remedy="cast the weights to one type first"
        )


def _extra_states(num_layers: int) -> dict[str, list[None]]:
    """The empty objects that Megatron stores beside each linear layer (room for FP8 scales) and asks for when it loads."""
    states: dict[str, list[None]] = {"output_layer._extra_state/shard_0_1": [None]}
    for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        for layer in range(num_layers):
            states[f"{_LAYERS}{name}._extra_state/shard_{layer}_{num_layers}"] = [None]
    return states


def write_model_checkpoint(directory: str | Path, own_tensors: Mapping[str, torch.Tensor], config: Config) -> None:
    """Write whole model tensors as a checkpoint from which training can start (`checkpoint.init_from`), but not resume.

    The folder appears complete or not at all. Raises `ConversionError` if the tensors are not exactly those of `config.model`, or
    if the folder exists and is not empty.
    """
    directory = Path(directory)
    num_layers = config.model.num_layers
    check_own(config.model, {name: spec_of(tensor) for name, tensor in own_tensors.items()})
    _check_stackable(own_tensors, num_layers=num_layers)
    with built_aside(directory) as aside:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            stored = _stack_layers(own_tensors, num_layers=num_layers) | _extra_states(num_layers)
            planner = DefaultSavePlanner(flatten_state_dict=False)  # an object is one entry, as Megatron has it
            dcp.save(stored, storage_writer=dcp.FileSystemWriter(aside), planner=planner, no_dist=True)
        torch.save({}, aside / "common.pt")
        (aside / CONFIG_FILE).write_text(to_yaml(config))
        (aside / METADATA_FILE).write_text(json.dumps(_METADATA))
