"""Byte streams of plain, .gz and .zst files, which detect damage and know the checksum of the file on disk.

The only module that uses `zstandard`, which is imported when a .zst file is opened.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CapabilityError

#: bytes read at once; few, because a compressed megabyte can expand to a thousand
_READ_BYTES = 1 << 18


class DamagedFileError(Exception):
    """A compressed file that is truncated or corrupt. What came before the damage is good."""


class ByteStream:
    """The content of one file, read from its start to its end."""

    def __init__(self, path: Path, *, read_bytes: int = _READ_BYTES) -> None:
        """Nothing is opened yet; `read_bytes` are read at once. Raises `CapabilityError` if a package is missing."""
        self.path = path
        self._read_bytes = min(read_bytes, _READ_BYTES)
        self._codec = _codec(path.suffix)
        self._digest = hashlib.sha256()
        self.bytes_read = 0
        """Bytes of the file on disk that were read so far."""

    @property
    def sha256(self) -> str:
        """Digest of the file on disk, of all that was read so far."""
        return self._digest.hexdigest()

    def _raw(self) -> Iterator[bytes]:
        with self.path.open("rb") as stream:
            while chunk := stream.read(self._read_bytes):
                self._digest.update(chunk)
                self.bytes_read += len(chunk)
                yield chunk

    def __iter__(self) -> Iterator[bytes]:
        """Chunks of the content. Raises `DamagedFileError` after the last good one, when the whole file has been read."""
        return self._raw() if self._codec is None else self._decompressed(*self._codec)

    def _decompressed(self, new_decoder: Callable[[], Any], error_type: type[Exception]) -> Iterator[bytes]:
        decoder, begun, damage = new_decoder(), False, ""
        for chunk in self._raw():
            # A file may be several compressed streams one after the other (`cat a.gz b.gz`, pigz, pzstd).
            while chunk and not damage:
                if decoder.eof:
                    if not chunk.strip(b"\0"):  # tapes and some tools pad with zeros
                        break
                    decoder = new_decoder()
                begun = True
                try:
                    content = decoder.decompress(chunk)
                except error_type as error:
                    damage = f"damaged: {error}"
                    break
                if content:
                    yield content
                chunk = decoder.unused_data if decoder.eof else b""
        if not damage and begun and not decoder.eof:
            damage = "truncated: the compressed stream has no end"
        if damage:
            raise DamagedFileError(damage)


def _codec(suffix: str) -> tuple[Callable[[], Any], type[Exception]] | None:
    """A decoder's constructor and what it raises; None for a plain file."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), zlib.error
    if suffix != ".zst":
        return None
    try:
        import zstandard
    except ImportError as error:
        raise CapabilityError(
            found="a .zst file, and no package zstandard",
            required="zstandard",
            remedy="pip install zstandard, or unpack the file",
        ) from error
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
