"""Fake quantisation: values are rounded to what a format can hold, and gradients pass as if they were not (straight through)."""

from __future__ import annotations

from typing import Any

import torch

from megatron_dmtd.quantization.formats import Format


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, format: Format) -> torch.Tensor:
        return format.quantize(x).dequantize().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def fake_quantize(x: torch.Tensor, format: Format) -> torch.Tensor:
    """`x` through `format` and back, in its own type. The gradient is exactly the upstream one, also where values were cut."""
    return _StraightThrough.apply(x, format)
