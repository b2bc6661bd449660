"""Files that hold one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import Refusal


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The object in a JSON text. Raises `ValueError`, also for other JSON values and excessive nesting."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_object(path: Path, refusal: Refusal) -> dict[str, Any]:
    """The object in a file. Raises `refusal` if the file cannot be read or holds anything else."""
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(f"{path} cannot be read: {error}") from error
