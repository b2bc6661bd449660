"""The arithmetic of a pass, as a protocol for its implementations: in torch (`torch_ops`, static shapes included) and in compiled
C (`native_ops`). Everything that a visit works on is one object, made once.

Shape legend: R rows of a pass, F rows that leave a visit, X hidden size, H query heads, G key/value heads, D head width, I
feed-forward width, V vocabulary, N positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_dmtd.architecture import AttentionSpec, DecoderSpec, RotaryProfile
from megatron_dmtd.architecture.rotary import rotary_tables
from megatron_dmtd.inference.cache_ops.passes import Move
from megatron_dmtd.inference.kv.codec import EncodedPages
from megatron_dmtd.inference.ops.linear import Linear
from megatron_dmtd.inference.weights import LayerWeights, Norm, Step


@dataclass(frozen=True, eq=False, slots=True)
class RotaryTable:
    """Cosines and sines of positions from 0, in the type of activations."""

    cos_ND: torch.Tensor
    sin_ND: torch.Tensor


#: By the profile and the head width.
RotaryTables = Mapping[tuple[RotaryProfile, int], RotaryTable]


def rotary_of(decoder: DecoderSpec, num_positions: int, *, dtype: torch.dtype, device: torch.device) -> RotaryTables:
    """A table for each rotary profile and head width that the decoder's layers have."""
    position_N = torch.arange(num_positions, device=device)
    tables = {}
    for profile, head_dim in decoder.rotary_profiles:
        cos_ND, sin_ND = rotary_tables(position_N, profile, head_dim, dtype)
        tables[profile, head_dim] = RotaryTable(cos_ND.contiguous(), sin_ND.contiguous())
    return tables


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayerVisit:
    """One visit of the schedule, with everything that it works on."""

    weights: LayerWeights
    attention: AttentionSpec
    """Sizes of its heads."""
    rotary: RotaryTable
    group: str
    """The K/V group that it writes and reads."""
    pages: EncodedPages
    """Its K and V there."""


class Ops(Protocol):
    """The arithmetic of one pass. A result may be overwritten by the next call of the same method, except that of `head`."""

    def norm(self, x_RX: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm over the last dimension, in fp32 or wider."""

    def linear(self, x_RX: torch.Tensor, linear: Linear) -> torch.Tensor:
        """`x @ weight.T + bias`."""

    def linear_add(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor) -> torch.Tensor:
        """`residual + x @ weight.T + bias`; `residual` may be overwritten."""

    def linear_step(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor, step: Step) -> torch.Tensor:
        """A step from `residual` towards `x @ weight.T + bias`; `residual` may be overwritten."""

    def gate(self, gate_up: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """`silu(gate) * up` of the two side by side, with the layer's scales before and its norm after it, if it has them."""

    def rotate_and_store(self, qkv: torch.Tensor, visit: LayerVisit) -> torch.Tensor:
        """Norm and rotate q and k, scale q, and store k and v of the rows that are kept. Gives all of them side by side again."""

    @property
    def move(self) -> Move | None:
        """Copies cached entries to other positions; None: torch does it (`PassViews.copy_moved`)."""

    def attend(self, qkv: torch.Tensor, visit: LayerVisit, *, final_only: bool) -> torch.Tensor:
        """Attention `[F, H * D]` of all rows, or of the final ones, with the layer's gate and norm if it has them."""

    def head(self, hidden_FX: torch.Tensor, linear: Linear, scale: torch.Tensor | None) -> torch.Tensor:
        """Logits `[F, V]`, in memory of their own."""
