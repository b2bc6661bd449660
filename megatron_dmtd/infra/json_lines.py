"""Files of JSON objects, one per line, that are appended to. A writer may be killed in the middle of a line."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron_dmtd.errors import Refusal
from megatron_dmtd.infra.json_files import parse_object

Record = TypeVar("Record")


def to_line(record: Mapping[str, Any]) -> str:
    """One line. JSON has no NaN and no infinity, so these are written as the strings "nan", "inf" and "-inf"."""
    finite = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def append(file: BinaryIO, line: str) -> None:
    """Append a line to an unbuffered file, all of it or nothing. Raises `OSError`."""
    data, end = line.encode(), file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def ends_torn(path: Path) -> bool:
    """Whether the last line of a file is incomplete: its writer was killed."""
    return not path.read_bytes().endswith(b"\n")


def read_lines(path: Path, parse: Callable[[dict[str, Any]], Record], refusal: Refusal) -> list[Record]:
    """The result of `parse` for each line's object, without an incomplete last line.

    Raises `refusal` at a line that is no object, or on which `parse` raises a `ValueError`, `TypeError` or `KeyError`.
    """
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(parse_object(line)))
        except (ValueError, TypeError, KeyError):
            raise refusal(f"{path}, line {number}: {line[:80]!r}") from None
    return records
