"""Byte streams of plain, .gz, .bz2, .xz and .zst files, which detect damage and know the checksum of the file on disk.

The only module that uses `zstandard`, which is imported when a .zst file is opened.
"""

from __future__ import annotations

import bz2
import enum
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CapabilityError

#: bytes read at once; few, because a compressed megabyte can expand to a thousand
_READ_BYTES = 1 << 18
#: the largest window of the format, that of `zstd --long=31`; a decoder takes the memory that the file's own window needs
_ZSTD_WINDOW = 1 << 31


class DamagedFileError(Exception):
    """A compressed file that is truncated or corrupt. What came before the damage is good."""


class _Follows(enum.Enum):
    """What comes after the end of a compressed stream."""

    STREAM = enum.auto()
    """Another one."""
    GARBAGE = enum.auto()
    """Bytes that the format's own tool leaves out, to the end of the file."""
    UNKNOWN = enum.auto()
    """That depends on bytes that are not there yet. At the end of the file: a stream that is cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Codec:
    new_decoder: Callable[[], Any]
    """Makes an object with `decompress`, `eof` and `unused_data`, for one compressed stream."""
    error: type[Exception]
    """What it raises at damage."""
    magic: bytes
    """What every stream begins with."""
    follows: Callable[[bytes], tuple[_Follows, bytes]]
    """What comes after a stream, by the bytes after it (at least one), and these without padding."""


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
        """A file may be several compressed streams one after the other (`cat a.gz b.gz`, pigz, pzstd)."""
        decoder, rest, damage = codec.new_decoder(), b"", ""
        raw = self._raw()
        for chunk in raw:
            rest += chunk
            while rest and not damage:
                if decoder is None:
                    follows, rest = codec.follows(rest)
                    if follows is _Follows.GARBAGE:
                        self._leave_out(rest, raw)
                        return
                    if follows is _Follows.UNKNOWN:
                        break
                    decoder = codec.new_decoder()
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
        if not damage and (decoder is not None or rest):
            damage = "truncated: the compressed stream has no end"
        if damage:
            raise DamagedFileError(damage)

    def _leave_out(self, rest: bytes, raw: Iterator[bytes]) -> None:
        num_bytes, is_padding = 0, True
        for chunk in chain((rest,), raw):
            num_bytes += len(chunk)
            is_padding = is_padding and not chunk.strip(b"\0")
        if not is_padding:
            self.remark = f"{num_bytes} bytes after the end of the compressed stream left out"


def _codec(suffix: str) -> _Codec | None:
    """How a file of this name is decompressed; None for a plain file."""
    if suffix == ".zst":
        return _zstandard()
    return _CODECS.get(suffix)


def _after_gzip(rest: bytes) -> tuple[_Follows, bytes]:
    """`gzip` takes all after a zero, or after two bytes that are not its magic number, for garbage. One byte alone it refuses."""
    if rest[0] != 0 and len(rest) < 2:
        return _Follows.UNKNOWN, rest
    return (_Follows.STREAM if rest.startswith(_GZIP) else _Follows.GARBAGE), rest


def _after_bzip2(rest: bytes) -> tuple[_Follows, bytes]:
    """`bzip2` takes whatever does not begin like a stream, with the block size as fourth byte, for the end."""
    if not (rest.startswith(_BZIP2) or _BZIP2.startswith(rest)) or rest[3:4] not in b"123456789":
        return _Follows.GARBAGE, rest
    return (_Follows.UNKNOWN if len(rest) < 4 else _Follows.STREAM), rest


def _after_xz(rest: bytes) -> tuple[_Follows, bytes]:
    """Zeros by fours are padding. The decoder refuses what is neither that nor a stream."""
    while rest.startswith(bytes(4)):
        rest = rest[4:]
    return (_Follows.UNKNOWN if not rest.strip(b"\0") else _Follows.STREAM), rest


def _after_zstandard(rest: bytes) -> tuple[_Follows, bytes]:
    """The format has no padding."""
    return _Follows.STREAM, rest


_GZIP, _BZIP2 = b"\x1f\x8b", b"BZh"
_CODECS = {
    ".gz": _Codec(
        new_decoder=lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), error=zlib.error, magic=_GZIP, follows=_after_gzip
    ),
    ".bz2": _Codec(new_decoder=bz2.BZ2Decompressor, error=OSError, magic=_BZIP2, follows=_after_bzip2),
    ".xz": _Codec(
        new_decoder=lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
        error=lzma.LZMAError,
        magic=b"\xfd7zXZ\0",
        follows=_after_xz,
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
        follows=_after_zstandard,
    )
