"""Model weights of a training checkpoint, read and written in one process: no GPU, no process group, no Megatron.

A run's folder holds one folder per step, `step_00000100/`, and `latest`, the name of the newest complete one. A step's folder
holds a `torch_dist` checkpoint (PyTorch's distributed format with Megatron's `common.pt` and `metadata.json`, written last) and
`config.yaml`, the whole configuration.

In the file the tensors of all layers are one tensor, `decoder.layers.<name>` with the layers as first axis; here they are
apart, `decoder.layers.<i>.<name>`. Optimizer state and objects other than tensors are left alone. Tensors must fit in memory.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dmtd.config import Config, from_yaml, to_yaml
from megatron_dmtd.conversion.rules import TensorSpec, check_own, spec_of
from megatron_dmtd.errors import CheckpointError, ConfigError, ConversionError

CONFIG_FILE = "config.yaml"
LATEST_FILE = "latest"
_METADATA_FILE = "metadata.json"
_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_LAYERS = "decoder.layers."
#: optimizer state, also that of chained optimizers
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.")


def _absent(found: str) -> CheckpointError:
    return CheckpointError(
        found=found,
        required=f"a run's folder (with `{LATEST_FILE}`), or the folder of one complete step (with `{_METADATA_FILE}`)",
        remedy="check the path; a step without its metadata was not saved to the end: use an earlier one",
    )


def find_step_directory(path: str | Path) -> Path:
    """The step's folder that `path` means: itself, or the newest complete one of a run. Raises `CheckpointError` without one."""
    path = Path(path)
    if not path.is_dir():
        raise _absent(f"no folder {path}")
    if (path / _METADATA_FILE).is_file():
        return path
    if not (path / LATEST_FILE).is_file():
        raise _absent(f"neither {LATEST_FILE} nor {_METADATA_FILE} in {path}")
    step = path / (path / LATEST_FILE).read_text().strip()
    if not (step / _METADATA_FILE).is_file():
        raise _absent(f"{path / LATEST_FILE} names {step.name}, which has no {_METADATA_FILE}")
    return step


def read_checkpoint_config(step_directory: str | Path) -> Config:
    """The configuration saved with a step. Raises `CheckpointError` if it is absent or not of this version."""
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


def _stack_layers(tensors: Mapping[str, torch.Tensor], *, num_layers: int) -> dict[str, torch.Tensor]:
    stacked = {}
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


def refuse_existing(directory: Path) -> None:
    """Raise `CheckpointError` if `directory` exists and is not an empty folder."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            found=f"{directory} exists and is not an empty folder",
            required="a new or empty folder",
            remedy="choose another, or remove it yourself",
        )


def write_model_checkpoint(directory: str | Path, own_tensors: Mapping[str, torch.Tensor], config: Config) -> None:
    """Write whole model tensors as one step's folder, from which training can start (`checkpoint.init_from`) but not resume.

    The folder appears complete or not at all. Raises `ConversionError` if the tensors are not exactly those of `config.model`,
    `CheckpointError` if the folder exists and is not empty.
    """
    directory = Path(directory)
    num_layers = config.model.num_layers
    check_own(config.model, {name: spec_of(tensor) for name, tensor in own_tensors.items()})
    _check_stackable(own_tensors, num_layers=num_layers)
    refuse_existing(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            stacked = _stack_layers(own_tensors, num_layers=num_layers)
            dcp.save(stacked, storage_writer=dcp.FileSystemWriter(temporary), no_dist=True)
        torch.save({}, temporary / "common.pt")
        (temporary / CONFIG_FILE).write_text(to_yaml(config))
        (temporary / _METADATA_FILE).write_text(json.dumps(_METADATA))
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
