"""One tokenised corpus on disk, `PREFIX.bin` and `PREFIX.idx`: Megatron's IndexedDataset, checked and memory-mapped.

The checks turn what Megatron answers with a bare assertion, or not at all, into a `DataError`: a missing, foreign, truncated or
mismatched file. Documents are those of the index; nothing is told by the value of a token.

Shape legend: D documents.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_dmtd.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
#: after the magic: version, dtype code, number of sequences, number of document bounds
_HEADER = struct.Struct("<QBQQ")
_REMEDY = "make the files again with tools/preprocess.py"


def token_file_paths(prefix: str) -> tuple[Path, Path]:
    """The .bin and the .idx file of `prefix`."""
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def _check_present(prefix: str) -> None:
    paths = token_file_paths(prefix)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            found=f"no file {' and no file '.join(missing)}",
            required=f"both {paths[0]} and {paths[1]}",
            remedy="check the prefix (it has no suffix), or make the files with tools/preprocess.py",
        )


def _check_index(prefix: str) -> None:
    _, index_path = token_file_paths(prefix)
    with index_path.open("rb") as stream:
        head = stream.read(len(_MAGIC) + _HEADER.size)
    if len(head) < len(_MAGIC) + _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(found=f"{index_path} starts with {head[:9]!r}", required="an IndexedDataset index", remedy=_REMEDY)
    _, _, num_sequences, num_bounds = _HEADER.unpack(head[len(_MAGIC) :])
    least = len(head) + num_sequences * (4 + 8) + num_bounds * 8
    size = index_path.stat().st_size
    if size < least:
        raise DataError(
            found=f"{index_path} of {size} bytes", required=f"{least} bytes for its {num_sequences} sequences", remedy=_REMEDY
        )
    if num_sequences == 0 or num_bounds < 2:
        raise DataError(found=f"{index_path} lists no documents", required="at least one document", remedy=_REMEDY)


class TokenFile:
    """Documents of token ids. Reading touches only the pages that are asked for."""

    def __init__(self, prefix: str) -> None:
        """Open `prefix`. Raises `DataError` if a file is missing, damaged, empty, or not the other's."""
        _check_present(prefix)
        _check_index(prefix)
        self.prefix = prefix
        bin_path, _ = token_file_paths(prefix)
        if bin_path.stat().st_size == 0:  # an empty file cannot be mapped
            raise DataError(found=f"{bin_path} is empty", required="at least one token", remedy=_REMEDY)

        from megatron.core.datasets.indexed_dataset import DType, IndexedDataset  # seconds of import

        self._dataset = IndexedDataset(prefix)
        # A document may be several sequences (other tools write one per sentence); they lie side by side in the file.
        self._bounds_D1 = np.asarray(self._dataset.document_indices, dtype=np.int64)
        ends = np.concatenate(([0], np.cumsum(self._dataset.sequence_lengths, dtype=np.int64)))
        self.document_lengths_D: npt.NDArray[np.int64] = np.diff(ends[self._bounds_D1])
        """Tokens of each document, int64 [D]."""
        required = int(ends[-1]) * DType.size(self._dataset.index.dtype)
        if bin_path.stat().st_size != required:
            raise DataError(
                found=f"{bin_path} of {bin_path.stat().st_size} bytes",
                required=f"the {required} bytes that its index describes",
                remedy=_REMEDY,
            )

    def __len__(self) -> int:
        """Number of documents."""
        return int(self.document_lengths_D.size)

    def read(self, document: int, start: int, count: int) -> npt.NDArray[np.integer]:
        """The tokens `start` to `start + count - 1` of a document, a read-only view of the file."""
        assert start >= 0 and start + count <= self.document_lengths_D[document], (document, start, count)
        if count == 0:  # an empty last document has no sequence to ask for
            return np.empty(0, dtype=self._dataset.index.dtype)
        return self._dataset.get(int(self._bounds_D1[document]), offset=start, length=count)
