"""Model weights of a training checkpoint, read and written in one process: no GPU, no process group, no Megatron.

A checkpoint (see `training/checkpoints/paths.py`) is a `torch_dist` directory: PyTorch's distributed format with Megatron's
`common.pt` and `metadata.json`, written last; next to it is `config.yaml`, the whole configuration.

In the files the tensors of all layers form one tensor, `decoder.layers.<name>`, with the layers as first axis, stored in as many
pieces as ranks wrote. Here they are separate, `decoder.layers.<i>.<name>`, and are read and written one at a time. Optimizer
state and objects other than tensors are ignored.

Written checkpoints get checksums (`infra/checksums.py`). Reading does not check them: whatever opens a checkpoint for a user
verifies it first (`conversion/sources.py`), since the format itself does not detect damage inside a tensor's bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_dmtd.config import Config, to_yaml
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.errors import CheckpointError, ConversionError
from megatron_dmtd.infra.checksums import write_checksums
from megatron_dmtd.infra.digests import sha256_of_file
from megatron_dmtd.infra.directories import new_directory
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.weights.checkpoint_files import CONFIG_FILE, METADATA_FILE, TOKENIZER_FOLDER
from megatron_dmtd.weights.megatron_names import LAYERS, check_megatron
from megatron_dmtd.weights.prefetch import Flusher, SteadyFile, read_ahead
from megatron_dmtd.weights.safetensors_files import map_tensor
from megatron_dmtd.weights.specs import TensorSpec

_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: optimizer state, also that of chained optimizers
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.")
#: a matrix of a layer
_LINEAR = re.compile(re.escape(LAYERS) + r"\d+\.(.*\.linear_\w+)\.weight")
#: what torch raises for absent, truncated or corrupt files
_READ_ERRORS = (OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError, AttributeError)


def _damaged(directory: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        found=f"{directory} cannot be read: {type(error).__name__}: {error}",
        required="a whole checkpoint",
        remedy="use another step, or copy the checkpoint again",
    )


def _is_stacked(key: str) -> bool:
    return key.startswith(LAYERS) and not key.removeprefix(LAYERS).split(".")[0].isdigit()


def _layer_key(key: str, layer: int) -> str:
    return f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}"


class CheckpointTensors:
    """The model's whole tensors, one per layer, whatever the layout that wrote them. Opening reads the metadata only."""

    def __init__(self, step_directory: str | Path) -> None:
        """Raises `CheckpointError` if the metadata is unreadable, or files that it names are absent, too short or not all."""
        self.directory = Path(step_directory)
        try:
            self._metadata = dcp.FileSystemReader(self.directory).read_metadata()
            self._stored = {
                key: entry
                for key, entry in self._metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata) and not _NOT_MODEL.match(key)
            }
        except _READ_ERRORS as error:
            raise _damaged(self.directory, error) from error
        self._check_files()
        self.specs: dict[str, TensorSpec] = {}
        """Shape and type of each tensor, by its name in a whole model."""
        self._places: dict[str, tuple[str, int | None]] = {}
        for key, entry in self._stored.items():
            self._index(key, tuple(entry.size), entry.properties.dtype)

    def _index(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not _is_stacked(key):
            self.specs[key], self._places[key] = TensorSpec(shape, dtype), (key, None)
            return
        for layer in range(shape[0]):
            name = _layer_key(key, layer)
            self.specs[name], self._places[name] = TensorSpec(shape[1:], dtype), (key, layer)

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        faults = []
        for key, entry in self._stored.items():
            found = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if found != math.prod(entry.size):
                faults.append(f"{key} has {found:,} of {math.prod(entry.size):,} numbers")
            for chunk in entry.chunks:
                place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        for name, size in sorted(needed.items()):
            path = self.directory / name
            if not path.is_file():
                faults.append(f"{name} is absent")
            elif path.stat().st_size < size:
                faults.append(f"{name} has {path.stat().st_size:,} of at least {size:,} bytes")
        if faults:
            raise _damaged(self.directory, ValueError("; ".join(faults)))

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor in CPU memory, as it is stored. Raises `CheckpointError` if its bytes are no tensor."""
        key, layer = self._places[name]
        stored = self._stored[key]
        offsets = [0] * len(stored.size) if layer is None else [layer, *[0] * (len(stored.size) - 1)]
        sizes = list(stored.size) if layer is None else [1, *stored.size[1:]]
        wanted = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        try:
            whole = self._read_piece(items[0]) if len(items) == 1 else self._assembled(items, wanted, stored.properties.dtype)
        except _READ_ERRORS as error:
            raise _damaged(self.directory, error) from error
        found, expected = (tuple(whole.shape), whole.dtype), (tuple(sizes), stored.properties.dtype)
        if found != expected:
            raise _damaged(self.directory, ValueError(f"{key} is {found}, where the metadata have {expected}"))
        return whole if layer is None else whole[0]

    def _assembled(self, items: list[ReadItem], wanted: ChunkStorageMetadata, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(wanted.sizes, dtype=dtype)
        for item in items:
            _narrowed(whole, item.dest_offsets, item.lengths).copy_(self._read_piece(item))
        return whole

    def _read_piece(self, item: ReadItem) -> torch.Tensor:
        """What one rank stored of a tensor, or the requested part of it."""
        place = self._metadata.storage_data[item.storage_index]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{place.relative_path} is stored by a transformation ({place.transform_descriptors})")
        piece = _mapped(self.directory / place.relative_path, place.offset, place.length)
        return _narrowed(piece, item.storage_offsets, item.lengths)


def _mapped(path: Path, offset: int, length: int) -> torch.Tensor:
    """The tensor that `torch.save` wrote at `offset` of a file, mapped into memory while it is used.

    Nothing is copied: with reads through a buffer an export took 1.7 times as long (docs/log.md).
    """
    with open(path, "rb") as file:
        view = cast(IO[bytes], _create_file_view(file, offset, length))
        shape = torch.load(view, map_location="meta", weights_only=True)
        view.seek(0)
        if not shape.is_contiguous() or shape.storage_offset() or shape.untyped_storage().nbytes() != shape.nbytes:
            return torch.load(view, map_location="cpu", weights_only=True)
        start = offset + torch._C.PyTorchFileReader(view).get_record_offset("data/0")  # type: ignore[attr-defined]
    return map_tensor(path, start, TensorSpec(tuple(shape.shape), shape.dtype))


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for axis, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor


def _check_stackable(specs: Mapping[str, TensorSpec], *, num_layers: int) -> None:
    """All layers of a tensor must have one type: stacking would change the others."""
    faults = []
    for name in specs:
        if name.startswith(f"{LAYERS}0."):
            suffix = name.removeprefix(f"{LAYERS}0.")
            types = {str(specs[f"{LAYERS}{layer}.{suffix}"].dtype) for layer in range(num_layers)}
            if len(types) > 1:
                faults.append(f"{LAYERS}*.{suffix} mixes {' and '.join(sorted(types))}")
    if faults:
        raise ConversionError(
            found="; ".join(faults), required="one type for all layers of a tensor", remedy="cast the weights to one type first"
        )


def _extra_state_keys(names: Iterable[str], num_layers: int) -> list[str]:
    """The empty objects that Megatron stores with each linear layer (room for FP8 scales) and asks for when it loads."""
    keys = ["output_layer._extra_state/shard_0_1"]
    for name in sorted({found[1] for name in names if (found := _LINEAR.fullmatch(name))}):
        keys += [f"{LAYERS}{name}._extra_state/shard_{layer}_{num_layers}" for layer in range(num_layers)]
    return keys


class _Stored:
    """The entries of a checkpoint that is being made: what is written, in one file per layer, and the metadata of the whole."""

    def __init__(self, specs: Mapping[str, TensorSpec], *, num_layers: int) -> None:
        self.names: dict[MetadataIndex, str] = {}
        """Megatron's name of each piece."""
        self.entries: dict[str, Any] = {key: BytesStorageMetadata() for key in _extra_state_keys(specs, num_layers)}
        objects = [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self.entries]
        by_file: dict[str, list[WriteItem]] = {"objects": objects}
        for name, spec in specs.items():
            layer = int(name.removeprefix(LAYERS).split(".")[0]) if name.startswith(LAYERS) else None
            by_file.setdefault(name if layer is None else f"layer {layer}", []).append(self._item(name, spec, layer, num_layers))
        self.plans = [SavePlan(items) for items in by_file.values()]

    def _item(self, name: str, spec: TensorSpec, layer: int | None, num_layers: int) -> WriteItem:
        if layer is None:
            key, size, offsets, sizes = name, spec.shape, [0] * len(spec.shape), spec.shape
        else:
            key = LAYERS + name.removeprefix(f"{LAYERS}{layer}.")
            size, offsets, sizes = (num_layers, *spec.shape), [layer, *[0] * len(spec.shape)], (1, *spec.shape)
        properties = TensorProperties(dtype=spec.dtype)
        entry = self.entries.setdefault(key, TensorStorageMetadata(properties=properties, size=torch.Size(size), chunks=[]))
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        entry.chunks.append(chunk)
        index = MetadataIndex(key, chunk.offsets)
        self.names[index] = name
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(size))
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class _SteadyFileSystem(FileSystem):
    """Storage for torch's writer."""

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with SteadyFile(Path(path), self._flusher) as stream:
            yield stream


class _InTurn(DefaultSavePlanner):
    """Gives the tensors as they arrive, in the order of the write items."""

    def __init__(self, stored: _Stored, tensors: Iterator[tuple[str, torch.Tensor]], specs: Mapping[str, TensorSpec]) -> None:
        super().__init__()
        self._stored, self._tensors, self._specs = stored, tensors, specs

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        name, tensor = next(self._tensors)
        spec = self._specs[name]
        assert name == self._stored.names[write_item.index], (name, write_item.index)
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), (name, tensor.shape, tensor.dtype, spec)
        assert write_item.tensor_data is not None
        return tensor.detach().reshape(write_item.tensor_data.chunk.sizes)


def write_model_checkpoint(
    directory: str | Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], torch.Tensor],
    config: Config,
    *,
    tokenizer: Sequence[Path] = (),
) -> None:
    """Write whole model tensors as a checkpoint from which training can start (`checkpoint.init_from`), but not resume.

    Args:
        directory: Complete or absent afterwards.
        specs: Every tensor, by its name in a whole model.
        read: Gives a tensor by its name. It is called by a thread, for the tensor after the one being written. A tensor is no
            longer used once the second one after it is requested.
        config: Saved with the checkpoint.
        tokenizer: Files of a tokenizer that exists nowhere else; they are copied into the folder `tokenizer`.

    Raises:
        ConversionError: The tensors are not exactly those of `config.model`, the folder is used, or the disk full.
    """
    directory = Path(directory)
    num_layers = config.model.num_layers
    check_megatron(decoder_of(config.model), specs)
    _check_stackable(specs, num_layers=num_layers)
    with new_directory(directory, error=ConversionError, num_bytes=sum(spec.num_bytes for spec in specs.values())) as aside:
        for path in tokenizer:
            (aside / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(path, aside / TOKENIZER_FOLDER / path.name)
        digests = _write_tensors(aside, _Stored(specs, num_layers=num_layers), read, specs)
        torch.save({}, aside / "common.pt")
        write_atomically(aside / CONFIG_FILE, to_yaml(config))
        write_atomically(aside / METADATA_FILE, json.dumps(_METADATA))
        write_checksums(aside, digests)


def _write_tensors(
    directory: Path, stored: _Stored, read: Callable[[str], torch.Tensor], specs: Mapping[str, TensorSpec]
) -> dict[str, str]:
    """Write the distributed files with torch's own writer, as if each layer came from its own rank. Their digests, by name."""
    # Files are flushed while they are being written. Copying ahead would take tensors out of order where there is a GPU.
    writer = dcp.FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in stored.plans])
    names = [stored.names[item.index] for plan in plans for item in plan.items if item.type != WriteItemType.BYTE_IO]
    planner = _InTurn(stored, read_ahead(names, read), specs)
    computes_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch.load does not look at them, and they cost as much as the writing
    results = []
    digests: dict[str, Future[str]] = {}
    try:
        with Flusher() as flusher, ThreadPoolExecutor(max_workers=1) as hasher:
            writer.fs = _SteadyFileSystem(flusher)
            for plan in plans:
                results.append(writer.write_data(plan, planner).wait())
                for file_name in {result.storage_data.relative_path for result in results[-1]}:
                    digests[file_name] = hasher.submit(sha256_of_file, directory / file_name)
    finally:
        torch.serialization.set_crc32_options(computes_checksums)
    writer.fs = FileSystem()  # renames what it has written
    writer.finish(Metadata(state_dict_metadata=stored.entries), results)
    with Flusher() as flusher:
        flusher.flush(directory / ".metadata")
    return {name: digest.result() for name, digest in digests.items()}
