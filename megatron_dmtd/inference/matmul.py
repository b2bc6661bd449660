"""Products of few rows and a weight matrix."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Matmul(Protocol):
    """`x [R, in]` times `weight [out, in]`, transposed, plus `bias [out]`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear`."""
    return functional.linear(x, weight, bias)
