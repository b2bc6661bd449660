"""Concurrent reading, writing and flushing, which makes a conversion about as fast as copying the files.

Knows nothing of tensors. Only one item is read ahead of the one being written, so memory stays bounded; and what has been written
is flushed continuously instead of all at the end.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from megatron_dmtd.infra.files import flush

#: bytes passed to the system at once, and bytes after which a flush is started
_PIECE_BYTES, _FLUSHED_BYTES = 2**25, 2**27

Key = TypeVar("Key")
Value = TypeVar("Value")


def read_ahead(keys: Iterable[Key], read: Callable[[Key], Value]) -> Iterator[tuple[Key, Value]]:
    """`(key, read(key))` in order; a thread reads the next one while the caller works on the current one. Errors pass through."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting: tuple[Key, Future[Value]] | None = None
        for key in keys:
            following = key, thread.submit(read, key)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()


class Flusher:
    """Flushes files to the disk in a thread. Leaving the block waits for all flushes, and raises what any of them raised."""

    def __enter__(self) -> Flusher:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._flushes: list[Future[None]] = []
        return self

    def flush(self, path: Path) -> None:
        """Begin to flush what has been written of a file so far."""
        self._flushes.append(self._thread.submit(flush, path))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for flush in self._flushes:
                flush.result()


class SteadyFile(io.RawIOBase):
    """A new file that is flushed in pieces while it is being written, even in the middle of one large tensor.

    Otherwise the system would collect what is written, and the disk would be idle until the final flush.
    """

    def __init__(self, path: Path, flusher: Flusher) -> None:
        self._path, self._flusher, self._unflushed_bytes = path, flusher, 0
        self._file = io.FileIO(path, "wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any, /) -> int:
        """Write all of `data`, a buffer of bytes. Raises `OSError`."""
        buffer = memoryview(data).cast("B")
        done = 0
        while done < len(buffer):
            count = self._file.write(buffer[done : done + _PIECE_BYTES])
            done, self._unflushed_bytes = done + count, self._unflushed_bytes + count
            if self._unflushed_bytes >= _FLUSHED_BYTES:
                self._flusher.flush(self._path)
                self._unflushed_bytes = 0
        return done

    def close(self) -> None:
        """Close the file and flush the rest of it."""
        if not self.closed:
            self._file.close()
            self._flusher.flush(self._path)
        super().close()
