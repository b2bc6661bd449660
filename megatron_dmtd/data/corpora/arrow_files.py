"""Files of Arrow's own format (IPC), which the `datasets` library keeps its data in: `.arrow` and `.feather`, a file or a stream.

A file has a footer that tells a whole one. A stream may end after any of its batches for all that Arrow's reader knows, so one
without the mark that writers put at the end is truncated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import DataError

SUFFIXES = (".arrow", ".feather")
FILE_MAGIC = b"ARROW1"
#: before the length of each message of a stream; a length of 0 ends it
_CONTINUATION = b"\xff\xff\xff\xff"
_END = _CONTINUATION + bytes(4)
#: streams of Arrow before 0.15 have lengths alone
_OLD_END = bytes(4)


def is_stream(content: bytes) -> bool:
    """Whether a file that begins with `content` is a stream."""
    return content.startswith(_CONTINUATION)


def check_stream_end(path: Path) -> None:
    """Raise `DataError` if the file is a stream without an end."""
    with path.open("rb") as stream:
        start = stream.read(len(_CONTINUATION))
        size = stream.seek(0, 2)
        stream.seek(max(0, size - len(_END)))
        end = stream.read()
    if start.startswith(FILE_MAGIC[:4]) or end == _END or (not is_stream(start) and end.endswith(_OLD_END)):
        return
    raise DataError(
        found=f"{path}, truncated: an Arrow stream without its end",
        required="a whole file",
        remedy="make or copy the file again",
    )


class ArrowFile:
    """An open file. Raises what `pyarrow` raises for one that is damaged."""

    def __init__(self, path: Path, keys: Sequence[str] = ()) -> None:
        """Only the columns `keys` are read, of those that there are; none: all."""
        import pyarrow

        with path.open("rb") as stream:
            self._is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
        if not self._is_file:
            check_stream_end(path)
        self._source = pyarrow.memory_map(str(path))
        opener = pyarrow.ipc.open_file if self._is_file else pyarrow.ipc.open_stream
        with opener(self._source) as reader:
            self.names: list[str] = reader.schema.names
        self._source.seek(0)
        included = [nth for nth, name in enumerate(self.names) if name in keys]
        self._reader: Any = opener(self._source, options=pyarrow.ipc.IpcReadOptions(included_fields=included))

    def batches(self) -> Iterator[Any]:
        """All record batches. Their structure is checked, the encoding of texts is not: that is a matter of one row."""
        import pyarrow

        count = self._reader.num_record_batches if self._is_file else 0
        for batch in map(self._reader.get_batch, range(count)) if self._is_file else self._reader:
            try:
                batch.validate(full=True)  # offsets outside of a column would end the process
            except pyarrow.ArrowInvalid as error:
                if "UTF8" not in str(error):
                    raise
            yield batch

    def __enter__(self) -> ArrowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()
