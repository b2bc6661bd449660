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
#: byte order marks, or what JSON begins with; the longer ones first: those of UTF-32 begin with those of UTF-16
_OTHER_ENCODINGS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"{\0\0\0": "UTF-32LE",
    b"[\0\0\0": "UTF-32LE",
    b"\0\0\0{": "UTF-32BE",
    b"\0\0\0[": "UTF-32BE",
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
    start, is_damaged = _start(path)
    encoding = other_encoding(start)
    if encoding:
        raise DataError(
            found=f"{path} in {encoding}",
            required="UTF-8",
            remedy=f"convert it: iconv -f {encoding} -t UTF-8 {path.name} > ...",
        )
    content = start.removeprefix(UTF8_MARK).lstrip()
    line, line_end, _ = content.partition(b"\n")
    is_only_line = not content[len(line) :].strip()
    if content.startswith(b"[") and (".json" in path.suffixes or is_only_line or not _is_json(line)):
        return "array"
    if line.strip() == b"{":
        raise DataError(
            found=f"{path}: a JSON object over several lines",
            required="one JSON object per line, or one array of objects",
            remedy=f"make lines of it: jq -c . {path.name} > ...",
        )
    if is_only_line and not is_damaged:
        _check_only_line(path, line, is_whole=bool(line_end) or len(start) < _START_BYTES)
    return "lines"


def _check_only_line(path: Path, line: bytes, *, is_whole: bool) -> None:
    """Raise `DataError` for a line that is many records: it would count as one bad document, though it is the whole file."""
    required, remedy = "one JSON object per line", f"make lines of it: jq -c . {path.name} > ..."
    if b"\r" in line.rstrip(b"\r"):  # no JSON text holds one
        remedy = f"convert it: tr '\\r' '\\n' < {path.name} > ..."
        raise DataError(found=f"{path}, whose lines end in CR alone", required=f"{required}, ended by LF", remedy=remedy)
    text = line.decode("utf-8", errors="replace")
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        if is_whole and line.strip():
            raise DataError(found=f"{path}, one line, which is not JSON: {error}", required=required, remedy=remedy) from error
        return
    if text[end:].strip() or (is_whole and not isinstance(value, dict)):
        found = "several JSON values on one line" if text[end:].strip() else f"a single JSON {type(value).__name__}"
        raise DataError(found=f"{path}, {found}", required=required, remedy=remedy)


def _start(path: Path) -> tuple[bytes, bool]:
    """The beginning of the content, and whether damage cuts it short: that is reported with its line when the file is read."""
    content = b""
    try:
        for chunk in ByteStream(path):
            content += chunk
            if len(content) >= _START_BYTES:
                return content[:_START_BYTES], False
    except DamagedFileError:
        return content, True
    return content, False


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
