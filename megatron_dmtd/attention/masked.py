"""The masked backend: one scaled-dot-product attention with a boolean mask from the visibility rule.

Slow and simple: it runs on every device, is the oracle for the other backends, and needs B x N x N (Refresh: B x N x 2N) bytes.

Shape legend: B rows, N slots per row, H query heads, G key-value heads, D head width, K keys (N or 2N).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dmtd.attention.joined import JoinedKeysAttention
from megatron_dmtd.cycle.geometry import Slots
from megatron_dmtd.cycle.mask import dense_mask, shadow_attention_slots, stream_slots


class MaskedAttention(JoinedKeysAttention):
    """See `protocol.AttentionBackend`. Masks are boolean [B, 1, N, K], true where a key is visible."""

    @cached_property
    def real_mask(self) -> torch.Tensor:
        """Causal inside each document."""
        slots = stream_slots(self.layout.documents_BN, self.layout.positions_BN, is_real=True)
        return self._mask(slots, slots)

    @cached_property
    def shadow_mask(self) -> torch.Tensor:
        """The variant's rule."""
        layout = self.layout
        return self._mask(*shadow_attention_slots(layout.documents_BN, layout.positions_BN, history=layout.history))

    def attend(self, q_BHND: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The scaled-dot-product attention of torch."""
        return scaled_dot_product_attention(q_BHND, k_BGKD, v_BGKD, attn_mask=mask, enable_gqa=True)

    def _mask(self, queries: Slots, keys: Slots) -> torch.Tensor:
        layout = self.layout
        mask_BNK = dense_mask(
            queries, keys, cycle_length=layout.cycle_length, history=layout.history, block_attention=layout.block_attention
        )
        return mask_BNK[:, None]
