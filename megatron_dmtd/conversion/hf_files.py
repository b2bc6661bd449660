"""The files of a Hugging Face model directory: safetensors, one file or indexed shards, and the tokenizer. Knows no model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open

from megatron_dmtd.conversion.directories import built_aside
from megatron_dmtd.conversion.rules import TensorSpec
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.hf.export import TOKENIZER_FILES

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

#: names of types in safetensors headers; others are shown as they are found
_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_TYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def _refusal(found: str) -> ConversionError:
    return ConversionError(
        found=found,
        required=f"{_SINGLE}, or {_INDEX} with all of its shards",
        remedy="download the model again, or save it with save_pretrained(..., safe_serialization=True)",
    )


def _read_index(directory: Path) -> dict[str, str]:
    """The weight map: tensor name to file name."""
    path = directory / _INDEX
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise _refusal(f"{path} without a readable weight_map ({error})") from error


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model directory, in order. Raises `ConversionError` if one is missing."""
    directory = Path(directory)
    if (directory / _INDEX).is_file():
        paths = [directory / name for name in sorted(set(_read_index(directory).values()))]
    elif (directory / _SINGLE).is_file():
        paths = [directory / _SINGLE]
    else:
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        raise _refusal(f"no safetensors in {directory}" + (f", but {', '.join(pickled)}" if pickled else ""))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise _refusal(f"{directory} lacks {', '.join(missing)}")
    return paths


def _names_by_file(directory: Path) -> dict[Path, list[str]]:
    """Tensor names of each file, checked against each other and against the index."""
    names: dict[Path, list[str]] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names[path] = list(file.keys())
        except SafetensorError as error:
            raise _refusal(f"{path}: {error}") from error
    counts = Counter(name for found in names.values() for name in found)
    faults = [f"{name} is in {count} files" for name, count in counts.items() if count > 1]
    if (directory / _INDEX).is_file():
        located = {name: path.name for path, found in names.items() for name in found}
        weight_map = _read_index(directory)
        faults += [f"{name} is not in {file}" for name, file in weight_map.items() if located.get(name) != file]
        faults += [f"{name} of {file} is not in the index" for name, file in located.items() if name not in weight_map]
    if faults:
        raise _refusal(f"{directory}: " + "; ".join(faults))
    return names


def read_hf_specs(directory: str | Path) -> dict[str, TensorSpec]:
    """Shape and type of each tensor of a model directory, from the headers alone."""
    specs: dict[str, TensorSpec] = {}
    for path, names in _names_by_file(Path(directory)).items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                header = file.get_slice(name)
                dtype = _TYPES.get(header.get_dtype())
                if dtype is None:
                    raise _refusal(f"{name} of {path} has type {header.get_dtype()}")
                specs[name] = TensorSpec(tuple(header.get_shape()), dtype)
    return specs


def read_hf_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory, in CPU memory, as they are stored."""
    tensors: dict[str, torch.Tensor] = {}
    for path, names in _names_by_file(Path(directory)).items():
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def tokenizer_files(directory: str | Path) -> list[Path]:
    """The tokenizer's files in a directory; none if it holds no tokenizer."""
    return sorted({path for pattern in TOKENIZER_FILES for path in Path(directory).glob(pattern)})


def _on_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a storage of its own size: the shard planner keeps what shares a storage in one shard, however large."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_hf_directory(
    directory: str | Path,
    *,
    fields: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    tokenizer_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_size: str = "5GB",
) -> None:
    """Write a model directory of an architecture that transformers itself knows: whole, or not at all.

    `fields` become `config.json`; `dtype` None stores the tensors as they are. Raises `ConversionError` if the directory is used.
    """
    stored = {name: _on_its_own(tensor.detach().to(dtype or tensor.dtype)) for name, tensor in tensors.items()}
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}
    with built_aside(Path(directory)) as aside:
        save_torch_state_dict(stored, aside, max_shard_size=shard_size)
        complete = dict(fields) | ({"torch_dtype": types.pop()} if len(types) == 1 else {})
        (aside / "config.json").write_text(json.dumps(complete, indent=2) + "\n")
        for path in tokenizer_files(tokenizer_dir) if tokenizer_dir else []:
            shutil.copyfile(path, aside / path.name)
