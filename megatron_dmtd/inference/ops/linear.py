"""Linear layers as values: each owns its weight, the format that it is stored in, and its bias.

A new format is a new class here and its kernel (`matmul.Product`); code that multiplies needs to know neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_dmtd.platform import products


class Linear(Protocol):
    """A matrix `[out, in]` in some format, with a bias or without."""

    @property
    def in_features(self) -> int:
        """Width of its input."""

    @property
    def out_features(self) -> int:
        """Width of its output."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias` in torch, on any device and in the type of `x`."""

    def load_weight(self, first_row: int, rows: torch.Tensor) -> None:
        """Overwrite rows of the weight in place, from `first_row` on."""

    def load_bias(self, first_row: int, rows: torch.Tensor) -> None:
        """Overwrite a part of the bias in place, from `first_row` on."""


@dataclass(frozen=True, eq=False, slots=True)
class DenseLinear:
    """Plain numbers: fp32, bf16 or fp64. If activations have another type, the weight is converted for each product."""

    weight: torch.Tensor
    """`[out, in]`, contiguous."""
    bias: torch.Tensor | None = None
    """`[out]`, of the activations' type."""

    @classmethod
    def empty(
        cls,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        bias_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> DenseLinear:
        """Memory for a layer to be loaded; with a bias if it has a type."""
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        bias = None if bias_dtype is None else torch.empty(out_features, dtype=bias_dtype, device=device)
        return cls(weight, bias)

    @property
    def in_features(self) -> int:
        """See `Linear`."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """See `Linear`."""
        return self.weight.shape[0]

    @property
    def num_bytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return products.linear(x, self.weight.to(x.dtype), self.bias)

    def load_weight(self, first_row: int, rows: torch.Tensor) -> None:
        """See `Linear`."""
        self.weight[first_row : first_row + len(rows)].copy_(rows)

    def load_bias(self, first_row: int, rows: torch.Tensor) -> None:
        """See `Linear`."""
        assert self.bias is not None, "a bias for a layer without one"
        self.bias[first_row : first_row + len(rows)].copy_(rows)
