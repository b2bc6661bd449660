"""The choice of a backend, and its refusal by name where it cannot run."""

from __future__ import annotations

import torch

from megatron_dmtd.attention.dense import DenseAttention
from megatron_dmtd.attention.protocol import AttentionBackend, StreamLayout
from megatron_dmtd.errors import CapabilityError


def select_backend(name: str, device: torch.device) -> str:
    """The backend that `name` (`auto`, `dense`, `flex`, `te`) means on `device`. Raises `CapabilityError` if it cannot train there."""
    if name == "auto":
        return "dense"
    if name == "dense":
        return name
    raise CapabilityError(
        found=f"parallel.attention_backend = {name} on {device.type}",
        required="a backend that is built: dense",
        remedy="set parallel.attention_backend to auto or dense",
    )


def make_backend(name: str, layout: StreamLayout) -> AttentionBackend:
    """A backend for one microbatch. `name` comes from `select_backend`."""
    assert name == "dense", name
    return DenseAttention(layout)
