"""What a source of raw documents is: an input, cut into blocks that are read and tokenised independently of each other.

An `Input` is one file, folder or data set. Its blocks have a fixed order and fixed bounds on every machine, so that the result of
a run does not depend on the number of workers and an interrupted run can continue. A `Block` is small, can be sent to another
process, and yields its documents there; an input reads only as much as it needs to find the bounds of its blocks.

Inputs of text are in `text_files.py`, of tables in `tables.py`; `sources.py` opens them by name. No tokens here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_dmtd.data.corpora.compressed import ByteStream
from megatron_dmtd.data.corpora.documents import BadDocument, Document, RecordKeys

#: approximate bytes of raw content in a block; a single document may be longer
BLOCK_BYTES = 4 << 20
#: documents in a block, at most, of inputs whose documents may be tiny or empty
BLOCK_DOCUMENTS = 4096

Entry = Document | BadDocument


class Block(Protocol):
    """A run of documents of one input."""

    @property
    def num_bytes(self) -> int:
        """Its share of the input, in the unit of `Input.num_bytes`."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Its documents, good and bad, in order."""
        ...


class Input(Protocol):
    """A source of blocks, which can be read from its start any number of times."""

    name: str
    """What the user called it, for the manifest."""
    description: str
    """Description of what is read of it."""
    num_bytes: int
    """All of it, for the time left; 0 if unknown."""

    def identity(self) -> str:
        """Changes when the content does, as far as this shows without reading it: a run is resumed only on the same inputs."""
        ...

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """All blocks, of about `block_bytes` each."""
        ...

    @property
    def sha256(self) -> str:
        """Checksum of the content, once all blocks have been read."""
        ...

    @property
    def remark(self) -> str:
        """What a user should know of it, once all blocks have been read; empty if nothing."""
        ...


class FileInput:
    """What all inputs of one file share. Subclasses add blocks."""

    def __init__(self, path: Path, keys: RecordKeys) -> None:
        self.name = str(path)
        self.description = f"{keys.description} of {path.name}"
        self.num_bytes = path.stat().st_size
        self._path, self._keys = path, keys

    def identity(self) -> str:
        """Path, size and time of change."""
        return file_identity(self._path)


class StreamInput(FileInput):
    """A file that is read as a stream of bytes, plain or compressed."""

    def __init__(self, path: Path, keys: RecordKeys) -> None:
        super().__init__(path, keys)
        self._stream = ByteStream(path)

    @property
    def sha256(self) -> str:
        """Digest of the file on disk, as `sha256sum` gives it."""
        return self._stream.sha256

    @property
    def remark(self) -> str:
        """What was left out of the file, once it has been read; empty if nothing."""
        return self._stream.remark


@dataclass(frozen=True, kw_only=True, slots=True)
class EntriesBlock:
    """Documents that are in memory."""

    documents: tuple[Entry, ...]
    num_bytes: int = 0

    def entries(self) -> Iterator[Entry]:
        """The documents."""
        return iter(self.documents)


def file_identity(path: Path) -> str:
    """Path, size and time of change."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode(errors="replace").decode()
