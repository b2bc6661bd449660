"""Byte streams of plain, .gz, .bz2, .xz and .zst files, which detect damage and know the checksum of the file on disk.

The only module that uses `zstandard`, which is imported when a .zst file is opened.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CapabilityError

#: bytes read at once; few, because a compressed megabyte can expand to a thousand
_READ_BYTES = 1 << 18
#: the largest window of the format, that of `zstd --long=31`; a decoder takes the memory that the file's own window needs
_ZSTD_WINDOW = 1 << 31


class DamagedFileError(Exception):
    """A compressed file that is truncated or corrupt. What came before the damage is good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Codec:
    new_decoder: Callable[[], Any]
    """Makes an object with `decompress`, `eof` and `unused_data`, for one compressed stream."""
    error: type[Exception]
    """What it raises at damage."""
    magic: bytes
    """What every stream begins with."""
    ends_at_garbage: bool
    """Whether the format's own tool takes what follows a stream and is none for the end of the file."""


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
        self.remark = ""
        """What was left out after the last compressed stream, as the format's own tool does; empty if nothing."""

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
        return self._raw() if self._codec is None else self._decompressed(self._codec)

    def _decompressed(self, codec: _Codec) -> Iterator[bytes]:
        """A file may be several compressed streams one after the other (`cat a.gz b.gz`, pigz, pzstd), padded with zeros."""
        decoder, begun, rest, damage = None, False, b"", ""
        raw = self._raw()
        for chunk in raw:
            rest += chunk
            while rest and not damage:
                if decoder is None:
                    rest = rest.lstrip(b"\0") if begun else rest
                    if begun and len(rest) < len(codec.magic):
                        break
                    if begun and codec.ends_at_garbage and not rest.startswith(codec.magic):
                        self._leave_out(len(rest), raw)
                        return
                    decoder, begun = codec.new_decoder(), True
                try:
                    content = decoder.decompress(rest)
                except codec.error as error:
                    damage = f"damaged: {error}"
                    break
                if content:
                    yield content
                rest = decoder.unused_data if decoder.eof else b""
                decoder = None if decoder.eof else decoder
            if damage:
                break
        for _ in raw:  # for the digest
            pass
        if not damage and decoder is not None:
            damage = "truncated: the compressed stream has no end"
        if not damage and rest and codec.magic.startswith(rest):
            damage = "truncated: the last compressed stream has no more than a beginning"
        if not damage and rest and codec.ends_at_garbage:
            self._leave_out(len(rest), raw)
        elif damage or rest:
            raise DamagedFileError(damage or f"damaged: {len(rest)} bytes after the end of the compressed stream")

    def _leave_out(self, num_bytes: int, raw: Iterator[bytes]) -> None:
        num_bytes += sum(map(len, raw))
        self.remark = f"{num_bytes} bytes after the end of the compressed stream left out"


def _codec(suffix: str) -> _Codec | None:
    """How a file of this name is decompressed; None for a plain file."""
    if suffix == ".zst":
        return _zstandard()
    return _CODECS.get(suffix)


_CODECS = {
    ".gz": _Codec(
        new_decoder=lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16),
        error=zlib.error,
        magic=b"\x1f\x8b",
        ends_at_garbage=True,
    ),
    ".bz2": _Codec(new_decoder=bz2.BZ2Decompressor, error=OSError, magic=b"BZh", ends_at_garbage=True),
    ".xz": _Codec(
        new_decoder=lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
        error=lzma.LZMAError,
        magic=b"\xfd7zXZ\0",
        ends_at_garbage=False,
    ),
}
#: suffixes of the formats that are read
COMPRESSIONS = (*_CODECS, ".zst")
#: what compressed and columnar files begin with, by the suffix that they should have
SIGNATURES = {
    **{suffix: codec.magic for suffix, codec in _CODECS.items()},
    ".zst": b"\x28\xb5\x2f\xfd",
    ".parquet": b"PAR1",
    ".arrow": b"ARROW1\0\0",
}


def _zstandard() -> _Codec:
    try:
        import zstandard
    except ImportError as error:
        raise CapabilityError(
            found="a .zst file, and no package zstandard",
            required="zstandard",
            remedy="pip install zstandard, or unpack the file",
        ) from error
    return _Codec(
        new_decoder=lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
        error=zstandard.ZstdError,
        magic=SIGNATURES[".zst"],
        ends_at_garbage=False,
    )
