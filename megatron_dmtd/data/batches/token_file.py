"""One tokenised corpus on disk, `PREFIX.bin` and `PREFIX.idx`: Megatron's IndexedDataset, read and written in constant memory.

The format is Megatron's, and its own reader opens these files. This reader differs in two ways: everything is memory-mapped or
streamed, so that neither reading nor writing an index takes memory in proportion to the corpus; and a missing, truncated or
mismatched file, or one of another format, is a `DataError`, where Megatron has a bare assertion or no check. Documents are those
of the index; the values of tokens mean nothing here.

Index: magic, version, dtype code, number Y of sequences, number U + 1 of document bounds; then the sequences' lengths (int32
[Y]), their byte offsets in the .bin file (int64 [Y]), and the document bounds in sequences (int64 [U + 1]). All offsets are
computed in 64 bits: a .bin file may pass 2 GiB and 2^31 tokens.

Shape legend: U documents, Y sequences, Z selected documents or sequences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_dmtd.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
#: after the magic: version, dtype code, number of sequences, number of document bounds
_HEADER = struct.Struct("<QBQQ")
_HEADER_BYTES = len(_MAGIC) + _HEADER.size
_VERSION = 1
#: Megatron's codes of the types that ids can have
_DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_REMEDY = "make the files again with tools/preprocess.py"
#: entries of an index that are in memory at once, while it is written or walked through
_CHUNK = 1 << 20
#: documents of a run, at most
_RUN = 1 << 16


def token_file_paths(prefix: str) -> tuple[Path, Path]:
    """The .bin and the .idx file of `prefix`."""
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def token_dtype(vocab_size: int) -> type[np.integer]:
    """The type that Megatron's own tools choose for ids below `vocab_size`: two bytes up to 65,499, four beyond."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def write_index(index_path: Path, lengths_path: Path, *, dtype: type[np.integer]) -> None:
    """Write the index of a file of one-sequence documents, whose lengths are the int32 numbers of the file `lengths_path`."""
    num_documents = lengths_path.stat().st_size // 4
    (code,) = (code for code, known in _DTYPES.items() if known is dtype)
    with index_path.open("wb") as stream:
        stream.write(_MAGIC + _HEADER.pack(_VERSION, code, num_documents, num_documents + 1))
        for lengths_Z in _length_chunks(lengths_path):
            stream.write(lengths_Z.tobytes())
        offset = 0
        for lengths_Z in _length_chunks(lengths_path):
            ends_Z = offset + np.cumsum(lengths_Z, dtype=np.int64) * np.dtype(dtype).itemsize
            stream.write(np.concatenate(([offset], ends_Z[:-1])).astype(np.int64).tobytes())
            offset = int(ends_Z[-1])
        for begin in range(0, num_documents + 1, _CHUNK):
            stream.write(np.arange(begin, min(begin + _CHUNK, num_documents + 1), dtype=np.int64).tobytes())


def _length_chunks(lengths_path: Path) -> Iterator[npt.NDArray[np.int32]]:
    with lengths_path.open("rb") as stream:
        while chunk := stream.read(4 * _CHUNK):
            yield np.frombuffer(chunk, dtype=np.int32)


def _check_present(prefix: str) -> None:
    paths = token_file_paths(prefix)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            found=f"no file {' and no file '.join(missing)}",
            required=f"both {paths[0]} and {paths[1]}",
            remedy="check the prefix (it has no suffix), or make the files with tools/preprocess.py",
        )


def _read_header(index_path: Path, stream: BinaryIO) -> tuple[type[np.integer], int, int]:
    """Type of the ids, number of sequences, number of document bounds."""
    head = stream.read(_HEADER_BYTES)
    if len(head) < _HEADER_BYTES or not head.startswith(_MAGIC):
        raise DataError(found=f"{index_path} starts with {head[:9]!r}", required="an IndexedDataset index", remedy=_REMEDY)
    version, code, num_sequences, num_bounds = _HEADER.unpack(head[len(_MAGIC) :])
    if version != _VERSION or code not in _DTYPES:
        raise DataError(
            found=f"{index_path} of version {version} with type code {code}",
            required=f"version {_VERSION} and an integer type",
            remedy=_REMEDY,
        )
    least = len(head) + num_sequences * (4 + 8) + num_bounds * 8
    size = index_path.stat().st_size
    if size < least:
        raise DataError(
            found=f"{index_path} of {size} bytes", required=f"{least} bytes for its {num_sequences} sequences", remedy=_REMEDY
        )
    if num_sequences == 0 or num_bounds < 2:
        raise DataError(found=f"{index_path} lists no documents", required="at least one document", remedy=_REMEDY)
    return _DTYPES[code], num_sequences, num_bounds


class TokenFile:
    """Documents of token ids. Opening takes constant time and memory; reading touches only the pages that are asked for."""

    def __init__(self, prefix: str) -> None:
        """Open `prefix`. Raises `DataError` if a file is missing, damaged or empty, or the two do not belong together."""
        _check_present(prefix)
        self.prefix = prefix
        bin_path, index_path = token_file_paths(prefix)
        with index_path.open("rb") as stream:
            self.dtype, num_sequences, num_bounds = _read_header(index_path, stream)
        self._num_bytes = bin_path.stat().st_size
        if self._num_bytes == 0:  # an empty file cannot be mapped
            raise DataError(found=f"{bin_path} is empty", required="at least one token", remedy=_REMEDY)
        at = _HEADER_BYTES
        self._lengths_Y = np.memmap(index_path, dtype=np.int32, mode="r", offset=at, shape=(num_sequences,))
        at += num_sequences * 4
        self._offsets_Y = np.memmap(index_path, dtype=np.int64, mode="r", offset=at, shape=(num_sequences,))
        at += num_sequences * 8
        self._bounds_U1 = np.memmap(index_path, dtype=np.int64, mode="r", offset=at, shape=(num_bounds,))
        self._check_ends(bin_path, index_path)
        self._tokens = np.memmap(bin_path, dtype=self.dtype, mode="r")

    def _check_ends(self, bin_path: Path, index_path: Path) -> None:
        required = int(self._offsets_Y[-1]) + int(self._lengths_Y[-1]) * self._itemsize
        if self._num_bytes != required:
            raise DataError(
                found=f"{bin_path} of {self._num_bytes} bytes",
                required=f"the {required} bytes that its index describes",
                remedy=_REMEDY,
            )
        bounds = int(self._bounds_U1[0]), int(self._bounds_U1[-1])
        if bounds != (0, self._lengths_Y.size):
            raise DataError(
                found=f"{index_path} whose documents are the sequences {bounds[0]} to {bounds[1]}",
                required=f"all of its {self._lengths_Y.size} sequences",
                remedy=_REMEDY,
            )

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def __len__(self) -> int:
        """Number of documents."""
        return int(self._bounds_U1.size) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._num_bytes // self._itemsize

    def _starts(self, documents_Z: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """First token of each document in the file; the number of documents stands for the end of the file."""
        sequences_Z = np.asarray(self._bounds_U1[documents_Z])
        inside_Z = sequences_Z < self._offsets_Y.size  # documents without sequences may follow the last sequence
        offsets_Z = np.full(sequences_Z.shape, self._num_bytes, dtype=np.int64)
        offsets_Z[inside_Z] = self._offsets_Y[sequences_Z[inside_Z]]
        return offsets_Z // self._itemsize

    def lengths(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens of the documents `begin` to `end - 1`, int64 [Z]."""
        assert 0 <= begin <= end <= len(self), (begin, end)
        # A document may be several sequences (other tools write one per sentence); they lie side by side in the file.
        return np.diff(self._starts(np.arange(begin, end + 1)))

    @property
    def document_lengths_U(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, int64 [U]: 8 bytes of memory per document."""
        return self.lengths(0, len(self))

    def check_index(self) -> None:
        """Walk through the whole index. Raises `DataError` if a length, offset or bound contradicts the others."""
        _, index_path = token_file_paths(self.prefix)
        expected, num_sequences = 0, self._lengths_Y.size
        for begin in range(0, num_sequences, _CHUNK):
            lengths_Z = np.asarray(self._lengths_Y[begin : begin + _CHUNK])
            ends_Z = expected + np.cumsum(lengths_Z, dtype=np.int64) * self._itemsize
            starts_Z = np.concatenate(([expected], ends_Z[:-1]))
            wrong = np.flatnonzero((self._offsets_Y[begin : begin + _CHUNK] != starts_Z) | (lengths_Z < 0))
            if wrong.size:
                raise DataError(
                    found=f"{index_path}, sequence {begin + int(wrong[0])}: not where the one before ends",
                    required="sequences side by side",
                    remedy=_REMEDY,
                )
            expected = int(ends_Z[-1])
        for begin in range(0, len(self), _CHUNK):
            if (np.diff(self._bounds_U1[begin : begin + _CHUNK + 1]) < 0).any():
                raise DataError(found=f"{index_path}: documents that go back", required="rising bounds", remedy=_REMEDY)

    def read(self, document: int, start: int, count: int) -> npt.NDArray[np.integer]:
        """The tokens `start` to `start + count - 1` of a document, a read-only view of the file."""
        begin, end = self._starts(np.array([document, document + 1])).tolist()
        assert start >= 0 and start + count <= end - begin, (document, start, count)
        return np.asarray(self._tokens[begin + start : begin + start + count])

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.integer]:
        """The tokens of the documents `begin` to `end - 1`, a read-only view of the file."""
        first, last = self._starts(np.array([begin, end])).tolist()
        return np.asarray(self._tokens[first:last])

    def runs(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """All documents in order as ranges (begin, end) of about `num_tokens` tokens, at least one document each."""
        begin = 0
        while begin < len(self):
            ends_Z = np.cumsum(self.lengths(begin, min(begin + _RUN, len(self))))
            end = begin + max(1, int(np.searchsorted(ends_Z, num_tokens, side="right")))
            yield begin, end
            begin = end

    def chunks(self, size: int = _CHUNK) -> Iterator[npt.NDArray[np.integer]]:
        """All tokens in order, at most `size` at a time."""
        for begin in range(0, self.num_tokens, size):
            yield np.asarray(self._tokens[begin : begin + size])
