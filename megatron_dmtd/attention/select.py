"""Chooses a backend. A backend that cannot run is refused by name."""

from __future__ import annotations

import torch

from megatron_dmtd.attention.dense import DenseAttention
from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.attention.protocol import AttentionBackend, StreamLayout
from megatron_dmtd.errors import CapabilityError


def _refuse(name: str, device: torch.device, *, required: str, remedy: str) -> CapabilityError:
    return CapabilityError(found=f"parallel.attention_backend = {name} on {device.type}", required=required, remedy=remedy)


#: minimum head width of torch's Triton kernels for FlexAttention (torch 2.13, `_inductor/kernel/flex/flex_attention.py`)
FLEX_MIN_HEAD_DIM = 16


def select_backend(name: str, device: torch.device, *, head_dim: int) -> str:
    """The backend that `name` means on `device`, for training. Raises `CapabilityError` if it cannot train there."""
    on_cpu = device.type == "cpu"
    if name == "auto":
        name = "dense" if on_cpu else "flex"
    if name == "dense" and not on_cpu:
        raise _refuse(name, device, required="a CPU, whose kernels it calls", remedy="use flex, or masked for short rows")
    if name == "flex" and on_cpu:
        raise _refuse(name, device, required="a GPU: torch has no backward pass of FlexAttention on a CPU", remedy="use dense")
    if name == "flex" and head_dim < FLEX_MIN_HEAD_DIM:
        raise CapabilityError(
            found=f"parallel.attention_backend = flex with a head width of {head_dim}",
            required=f"a head width of at least {FLEX_MIN_HEAD_DIM}: torch's kernels do not support narrower ones",
            remedy="use masked for short rows, or raise model.head_dim",
        )
    if name == "te":
        from megatron_dmtd.attention import te

        te.require_transformer_engine()
    return name


def make_backend(name: str, layout: StreamLayout) -> AttentionBackend:
    """A backend for one microbatch. `name` comes from `select_backend`."""
    if name == "dense":
        return DenseAttention(layout)
    if name == "masked":
        return MaskedAttention(layout)
    if name == "flex":
        from megatron_dmtd.attention.flex import FlexAttention

        return FlexAttention(layout)
    assert name == "te", name
    from megatron_dmtd.attention.te import TransformerEngineAttention

    return TransformerEngineAttention(layout)
