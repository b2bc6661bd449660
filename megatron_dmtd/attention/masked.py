"""The masked backend: one scaled-dot-product attention with a boolean mask from the visibility rule.

Slow and obvious: it runs on every device, is the oracle of the other backends, and needs B x N x N (Refresh: B x N x 2N) bytes.

Shape legend: B rows, N slots per row, H query heads, G key-value heads, D head width, K keys (N or 2N).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dmtd.attention.protocol import StreamLayout
from megatron_dmtd.cycle.geometry import Slots
from megatron_dmtd.cycle.mask import dense_mask, shadow_attention_slots, stream_slots


class MaskedAttention:
    """See `protocol.AttentionBackend`."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout

    def real(self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each document."""
        return scaled_dot_product_attention(q_BHND, k_BGND, v_BGND, attn_mask=self._real_mask, enable_gqa=True)

    def shadow(
        self,
        q_BHND: torch.Tensor,
        k_BGND: torch.Tensor,
        v_BGND: torch.Tensor,
        real_k_BGND: torch.Tensor | None,
        real_v_BGND: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shadow queries: by the rule of the variant."""
        k_BGKD, v_BGKD = k_BGND, v_BGND
        if self.layout.history == "real":
            assert real_k_BGND is not None and real_v_BGND is not None, "Refresh reads the real stream"
            k_BGKD, v_BGKD = torch.cat((real_k_BGND, k_BGND), dim=2), torch.cat((real_v_BGND, v_BGND), dim=2)
        return scaled_dot_product_attention(q_BHND, k_BGKD, v_BGKD, attn_mask=self._shadow_mask, enable_gqa=True)

    def _mask(self, queries: Slots, keys: Slots) -> torch.Tensor:
        layout = self.layout
        mask_BQK = dense_mask(
            queries, keys, cycle_length=layout.cycle_length, history=layout.history, block_attention=layout.block_attention
        )
        return mask_BQK[:, None]

    @cached_property
    def _real_mask(self) -> torch.Tensor:
        slots = stream_slots(self.layout.documents_BN, self.layout.positions_BN, is_real=True)
        return self._mask(slots, slots)

    @cached_property
    def _shadow_mask(self) -> torch.Tensor:
        layout = self.layout
        return self._mask(*shadow_attention_slots(layout.documents_BN, layout.positions_BN, history=layout.history))
