"""Figures: what a tree computes, as lines of text that are equal exactly when it is equal bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

#: figure by name
Items = dict[str, str]


class MeasureError(Exception):
    """A command of the measured tree failed."""


def number(value: float) -> str:
    """A float to the last bit, and readable."""
    return f"{value.hex()} ({value:.8g})"


def tensor(value: torch.Tensor) -> str:
    """Type, shape, largest magnitude and digest of the bytes."""
    whole = value.detach().cpu().contiguous()
    digest = hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    largest = whole.double().abs().max().item() if whole.numel() else 0.0
    return f"{str(whole.dtype).removeprefix('torch.')} {list(whole.shape)} largest {largest:.8g} sha256 {digest}"


def leaves(value: Any, prefix: str = "") -> Items:
    """Every leaf of a JSON value by its path."""
    if isinstance(value, Mapping):
        pairs = [(str(key), value[key]) for key in sorted(value)]
    elif isinstance(value, list) and value:
        pairs = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: number(value) if isinstance(value, float) else json.dumps(value)}
    found: Items = {}
    for key, item in pairs:
        found |= leaves(item, f"{prefix}/{key}" if prefix else key)
    return found


def under(prefix: str, items: Items) -> Items:
    """The same items, their names below `prefix`."""
    return {f"{prefix}/{name}": figure for name, figure in items.items()}
