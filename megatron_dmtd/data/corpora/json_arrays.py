"""Files that hold one JSON array of records, as `.json` data sets often do: `[{"text": ...}, {"text": ...}]`.

The whole file is read at once, since nothing short of its end shows that it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dmtd.data.corpora.compressed import ByteStream, DamagedFileError
from megatron_dmtd.data.corpora.documents import BadDocument, RecordKeys
from megatron_dmtd.data.corpora.inputs import BLOCK_DOCUMENTS, Block, EntriesBlock, Entry, StreamInput
from megatron_dmtd.errors import DataError

#: bytes of content that are held in memory at once
LARGEST_ARRAY = 2 << 30


def to_lines(path: Path) -> str:
    """The command that makes lines of an array."""
    return f"jq -c '.[]' {path.name} > {path.name.split('.')[0]}.jsonl"


class ArrayInput(StreamInput):
    """A file with one JSON array. Its documents are named `file:item`, counted from 1."""

    def __init__(self, path: Path, keys: RecordKeys, *, largest: int = LARGEST_ARRAY) -> None:
        super().__init__(path, keys)
        self._largest = largest

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """Runs of records. Raises `DataError` if the file is no whole array, or too large to be held in memory."""
        items = self._items()
        bytes_per_item = self.num_bytes / max(len(items), 1)
        per_block = min(BLOCK_DOCUMENTS, max(1, int(block_bytes / max(bytes_per_item, 1))))
        for begin in range(0, len(items), per_block):
            entries = tuple(self._entry(item, begin + nth) for nth, item in enumerate(items[begin : begin + per_block], start=1))
            yield EntriesBlock(documents=entries, num_bytes=round(bytes_per_item * len(entries)))

    def _items(self) -> list[Any]:
        self._stream = ByteStream(self._path)
        content = bytearray()
        required = "one whole JSON array in UTF-8"
        try:
            for chunk in self._stream:
                content += chunk
                if len(content) > self._largest:
                    raise DataError(
                        found=f"{self._path}, a JSON array of more than {self._largest >> 20} MiB",
                        required="a JSON array that fits into memory, or one record per line",
                        remedy=f"make lines of it: {to_lines(self._path)}",
                    )
            items = json.loads(content.decode("utf-8-sig"))
        except (DamagedFileError, ValueError, RecursionError) as error:
            found = f"{self._path}: {error}"
            raise DataError(found=found, required=required, remedy="make or copy the file again") from error
        if not isinstance(items, list):
            found = f"{self._path}: {type(items).__name__}"
            raise DataError(found=found, required=required, remedy="make or copy the file again")
        return items

    def _entry(self, item: Any, number: int) -> Entry:
        name, where = f"{self._path.name}:{number}", f"item {number} of {self._path}"
        if isinstance(item, dict):
            return self._keys.document(item, name=name, where=where)
        found = f"{where}: {type(item).__name__}"
        return BadDocument(name=name, kind="not JSON", found=found, required="one JSON object per item of the array")
