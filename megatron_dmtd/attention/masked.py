"""The masked backend: one scaled-dot-product attention with a boolean mask from the visibility rule.

Slow and simple: it runs on every device, is the oracle for the other backends, and needs B x N x N (Refresh: B x N x 2N) bytes.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width, K keys (N or 2N).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dmtd.attention.joined import JoinedKeysAttention
from megatron_dmtd.cycle.geometry import Slots
from megatron_dmtd.cycle.mask import dense_mask, shadow_attention_slots, stream_slots


class MaskedAttention(JoinedKeysAttention[torch.Tensor]):
    """See `protocol.AttentionBackend`. Masks are boolean [B, 1, N, K], true where a key is seen."""

    def make_real_mask(self, window: int | None) -> torch.Tensor:
        """Causal inside each document."""
        slots = stream_slots(self.layout.documents_BN, self.layout.positions_BN, is_real=True)
        return self._make_mask(slots, slots, window)

    def make_shadow_mask(self, window: int | None) -> torch.Tensor:
        """The variant's rule."""
        layout = self.layout
        slots = shadow_attention_slots(layout.documents_BN, layout.positions_BN, method=layout.method)
        return self._make_mask(*slots, window)

    def attend(self, q_BHND: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The scaled-dot-product attention of torch."""
        return scaled_dot_product_attention(q_BHND, k_BGKD, v_BGKD, attn_mask=mask, enable_gqa=True)

    def _make_mask(self, queries: Slots, keys: Slots, window: int | None) -> torch.Tensor:
        return dense_mask(queries, keys, method=self.layout.method, window=window)[:, None]
