"""What a file really holds, by its first bytes: a name is a claim, and a file that breaks it would lose every record.

Compression, encoding and layout are looked at before the first document is read, so that the true reason is named at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from megatron_dmtd.data.corpora.arrow_files import SUFFIXES as ARROW_SUFFIXES
from megatron_dmtd.data.corpora.arrow_files import is_stream
from megatron_dmtd.data.corpora.compressed import SIGNATURES, ByteStream, DamagedFileError
from megatron_dmtd.errors import DataError

#: bytes of content that are looked at
_START_BYTES = 1 << 16
#: byte order marks, the longer ones first: that of UTF-32 begins with that of UTF-16
_OTHER_ENCODINGS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16LE",
    b"[\0": "UTF-16LE",
    b"\0{": "UTF-16BE",
    b"\0[": "UTF-16BE",
}
UTF8_MARK = b"\xef\xbb\xbf"
#: frames that decoders of .zst skip begin with one of sixteen numbers: 0x184D2A50 to 0x184D2A5F
_SKIPPED_FRAME = b"\x2a\x4d\x18"

Layout = Literal["lines", "array"]


def format_of(content: bytes) -> str:
    """The suffix that files with this content have, of the formats that begin with a signature; else empty."""
    if content[1:4] == _SKIPPED_FRAME and content[0] & 0xF0 == 0x50:
        return ".zst"
    if is_stream(content):
        return ".arrow"
    return next((suffix for suffix, magic in SIGNATURES.items() if content.startswith(magic)), "")


def other_encoding(content: bytes) -> str:
    """The encoding, if the first bytes show one that is not UTF-8; else empty."""
    return next((name for mark, name in _OTHER_ENCODINGS.items() if content.startswith(mark)), "")


def check_signature(path: Path) -> None:
    """Raise `DataError` if the content of a file is of another format than its name says."""
    claimed = ".arrow" if path.suffix in ARROW_SUFFIXES else path.suffix if path.suffix in SIGNATURES else ""
    with path.open("rb") as stream:
        start = stream.read(8)
    found = format_of(start)
    if found == claimed:
        return
    if found:
        raise DataError(
            found=f"{path}, which holds the format of {found} files",
            required=f"a name that ends in {found}",
            remedy="rename the file",
        )
    raise DataError(
        found=f"{path}, which begins with {start!r}",
        required=f"a {claimed} file",
        remedy="make or copy the file again, or rename it if it is not compressed",
    )


def layout_of(path: Path) -> Layout:
    """Whether a JSON file holds a record per line or one array. Raises `DataError` for what is neither, or not UTF-8."""
    check_signature(path)
    start = _start(path)
    encoding = other_encoding(start)
    if encoding:
        raise DataError(
            found=f"{path} in {encoding}",
            required="UTF-8",
            remedy=f"convert it: iconv -f {encoding} -t UTF-8 {path.name} > ...",
        )
    content = start.removeprefix(UTF8_MARK).lstrip()
    line, line_end, _ = content.partition(b"\n")
    if content.startswith(b"[") and (".json" in path.suffixes or (line_end and not _is_json(line))):
        return "array"
    if line.strip() == b"{":
        raise DataError(
            found=f"{path}: a JSON object over several lines",
            required="one JSON object per line, or one array of objects",
            remedy=f"make lines of it: jq -c . {path.name} > ...",
        )
    return "lines"


def _start(path: Path) -> bytes:
    content = b""
    try:
        for chunk in ByteStream(path):
            content += chunk
            if len(content) >= _START_BYTES:
                break
    except DamagedFileError:
        pass  # reported with its line when the file is read
    return content[:_START_BYTES]


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
