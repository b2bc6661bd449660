"""Safetensors files of a model directory, one or indexed shards: read and written tensor by tensor. Knows no model.

A file is never mapped into memory as a whole: mapped pages count as memory of the process until they are unmapped, so to a
scheduler a reader of a large model would seem to hold all of it. Single tensors may be mapped.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from megatron_dmtd.errors import ConversionError
from megatron_dmtd.infra.json_files import parse_object
from megatron_dmtd.weights.prefetch import Flusher, SteadyFile
from megatron_dmtd.weights.specs import TensorSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
#: files of a PEFT adapter
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

#: names of types in headers
_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_TYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
#: what the format allows
_MAX_HEADER_BYTES = 10**8
_COMPARED_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor is stored."""

    path: Path
    offset: int
    num_bytes: int
    spec: TensorSpec


def _refusal(found: str) -> ConversionError:
    return ConversionError(
        found=found,
        required=f"{SINGLE_FILE}, or {INDEX_FILE} with all of its shards, whole",
        remedy="download the model again, or save it with save_pretrained(..., safe_serialization=True)",
    )


def map_tensor(path: Path, offset: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor stored at `offset` of a file. Writing to it changes memory, never the file."""
    numbers = numpy.memmap(path, mode="c", dtype=numpy.uint8, offset=offset, shape=(spec.num_bytes,))
    return torch.from_numpy(numbers).view(spec.dtype).reshape(spec.shape)


class WeightFiles:
    """The tensors of a model directory. Opening reads headers only, and checks them, the files' sizes and the index."""

    def __init__(self, directory: str | Path) -> None:
        """Raises one `ConversionError` for all missing or truncated files and for a wrong index."""
        self.directory = Path(directory)
        self._places = _all_places(self.directory)
        self.specs: dict[str, TensorSpec] = {name: place.spec for name, place in self._places.items()}
        """Shape and type of each tensor, by its name."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as it is stored."""
        spec = self.specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        self.read_into(name, tensor)
        return tensor

    def mapped(self, name: str) -> torch.Tensor:
        """One tensor, as it is stored, mapped into memory while it is used: nothing is copied."""
        place = self._places[name]
        return map_tensor(place.path, place.offset, place.spec)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Read one tensor into a tensor, or a view of one, with the same number of elements and the same type."""
        place = self._places[name]
        assert target.dtype == place.spec.dtype and target.numel() == math.prod(place.spec.shape), (name, target.shape)
        if not target.is_contiguous():
            target.copy_(self.read(name).reshape(target.shape))
            return
        with open(place.path, "rb", buffering=0) as file:
            file.seek(place.offset)
            _fill(file, _bytes_of(target))

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same bits. Reads a part at a time."""
        one, other = self._places[first], self._places[second]
        if one.spec != other.spec:
            return False
        with open(one.path, "rb") as file, open(other.path, "rb") as other_file:
            file.seek(one.offset)
            other_file.seek(other.offset)
            for start in range(0, one.num_bytes, _COMPARED_BYTES):
                size = min(_COMPARED_BYTES, one.num_bytes - start)
                if file.read(size) != other_file.read(size):
                    return False
        return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _fill(file: BinaryIO, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):  # one read gives at most 2 GiB
        count = file.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            raise _refusal(f"{file.name} became shorter while it was read")
        done += count


def _read_index(directory: Path) -> dict[str, str]:
    """The weight map: tensor name to file name."""
    path = directory / INDEX_FILE
    try:
        return {str(name): str(file) for name, file in parse_object(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(f"{path} without a readable weight_map ({error})") from error


def _check_one_model(directory: Path) -> None:
    """Refuse a folder that holds a second set of weights: loaders differ in which of them they take."""
    adapters = [name for name in ADAPTER_FILES if (directory / name).exists()]
    if adapters:
        raise ConversionError(
            found=f"{directory} with {', '.join(adapters)} next to the model's own files",
            required="the weights of one model: a loader of transformers would add the adapter to them",
            remedy="merge the adapter into the model (peft: merge_and_unload) and save it, or move the adapter's files away",
        )
    is_both = (directory / SINGLE_FILE).is_file() and (directory / INDEX_FILE).is_file()
    if is_both and set(_read_index(directory).values()) != {SINGLE_FILE}:
        raise ConversionError(
            found=f"{directory} with {SINGLE_FILE} and with {INDEX_FILE}, which names other files",
            required="one set of weights: transformers loads the single file, other loaders the shards of the index",
            remedy=f"remove {INDEX_FILE} and its shards, or {SINGLE_FILE}, whichever is the older",
        )


def _weight_paths(directory: Path) -> list[Path]:
    _check_one_model(directory)
    if (directory / INDEX_FILE).is_file():
        paths = [directory / name for name in sorted(set(_read_index(directory).values()))]
    elif (directory / SINGLE_FILE).is_file():
        paths = [directory / SINGLE_FILE]
    else:
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        raise _refusal(f"no safetensors in {directory}" + (f", but {', '.join(pickled)}" if pickled else ""))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise _refusal(f"{directory} lacks {', '.join(missing)}")
    return paths


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the data begins. Raises `ValueError` if the file is not of this format."""
    with open(path, "rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > _MAX_HEADER_BYTES:
            raise ValueError("no safetensors header")
        text = file.read(size)
    if len(text) < size:
        raise ValueError("cut off inside its header")
    entries = parse_object(text)
    entries.pop("__metadata__", None)
    return entries, 8 + size


def _places_of_file(path: Path) -> dict[str, _Place]:
    """The tensors of one file. Raises `ValueError` with all that is wrong with it."""
    entries, data_start = _read_header(path)
    places: dict[str, _Place] = {}
    faults: list[str] = []
    for name, entry in entries.items():
        dtype = _TYPES.get(entry["dtype"])
        if dtype is None:
            faults.append(f"{name} has type {entry['dtype']}")
            continue
        spec = TensorSpec(tuple(entry["shape"]), dtype)
        start, end = entry["data_offsets"]
        if end - start != spec.num_bytes or start < 0:
            faults.append(f"{name} of shape {list(spec.shape)} has {end - start} bytes")
        places[name] = _Place(path=path, offset=data_start + start, num_bytes=end - start, spec=spec)
    spans = sorted((place.offset, place.offset + place.num_bytes) for place in places.values())
    if any(first[1] != second[0] for first, second in itertools.pairwise(spans)):
        faults.append("tensors overlap, or leave gaps")
    if not faults and spans:
        required, found = spans[-1][1], path.stat().st_size
        if found != required:
            faults.append(f"{found} bytes long, where its header needs {required}")
    if faults:
        raise ValueError("; ".join(faults))
    return places


def _all_places(directory: Path) -> dict[str, _Place]:
    by_file: dict[Path, dict[str, _Place]] = {}
    faults: list[str] = []
    for path in _weight_paths(directory):
        try:
            by_file[path] = _places_of_file(path)
        except (ValueError, KeyError, TypeError) as error:
            faults.append(f"{path.name}: {error}")
    if not faults:
        faults = _contradictions(directory, by_file)
    if faults:
        raise _refusal(f"{directory}: " + "; ".join(faults))
    return {name: place for places in by_file.values() for name, place in places.items()}


def _contradictions(directory: Path, by_file: Mapping[Path, Mapping[str, _Place]]) -> list[str]:
    """Contradictions between the files and the index."""
    counts = Counter(name for places in by_file.values() for name in places)
    faults = [f"{name} is in {count} files" for name, count in counts.items() if count > 1]
    if (directory / INDEX_FILE).is_file():
        located = {name: path.name for path, places in by_file.items() for name in places}
        weight_map = _read_index(directory)
        faults += [f"{name} is not in {file}" for name, file in weight_map.items() if located.get(name) != file]
        faults += [f"{name} of {file} is not in the index" for name, file in located.items() if name not in weight_map]
    return faults


def write_weights(
    directory: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors, one after the other, into files of at most `shard_bytes`, with an index if there is more than one.

    `specs` lists every tensor in advance; `tensors` are in the same order. The bytes depend only on the arguments. A larger
    tensor gets a file of its own.
    """
    shards = _shards(specs, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE_FILE]
    stream = iter(tensors)
    with Flusher() as flusher:
        for file_name, shard in zip(names, shards, strict=True):
            _write_file(directory / file_name, {name: specs[name] for name in shard}, stream, flusher)
    left = next(stream, None)
    assert left is None, f"{left and left[0]} was not announced"
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(spec.num_bytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.num_bytes
    return shards


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.num_bytes
        entries[name] = {"dtype": _TYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _write_file(
    path: Path, specs: Mapping[str, TensorSpec], stream: Iterator[tuple[str, torch.Tensor]], flusher: Flusher
) -> None:
    with SteadyFile(path, flusher) as file:
        file.write(_header(specs))
        for name, spec in specs.items():
            found, tensor = next(stream)
            assert (found, tuple(tensor.shape), tensor.dtype) == (name, spec.shape, spec.dtype), (found, name, tensor.shape, spec)
            file.write(_bytes_of(tensor.contiguous()))
            del tensor
