"""What a file's header tells of a tensor: its shape and its type."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]

#: Types of weights; anything else (quantised, integer) has no counterpart in another format.
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor in memory."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)
