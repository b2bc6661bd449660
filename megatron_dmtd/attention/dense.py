"""The dense backend: torch's scaled-dot-product attention with boolean masks from the visibility rule.

It runs on every device and is the oracle of the other backends. Where plain causal attention is meant and each row is one
document it builds no mask. Otherwise a mask costs B x N x N (or N x 2N) bytes per microbatch.

Shape legend: B rows, N slots per row, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dmtd.attention.protocol import StreamLayout
from megatron_dmtd.cycle import visible


class DenseAttention:
    """See `protocol.AttentionBackend`."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout

    def real(self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each document."""
        if self.layout.one_document_per_row:
            return scaled_dot_product_attention(q_BHND, k_BGND, v_BGND, is_causal=True, enable_gqa=True)
        return scaled_dot_product_attention(q_BHND, k_BGND, v_BGND, attn_mask=self._real_mask, enable_gqa=True)

    def shadow(
        self,
        q_BHND: torch.Tensor,
        k_BGND: torch.Tensor,
        v_BGND: torch.Tensor,
        real_k_BGND: torch.Tensor | None,
        real_v_BGND: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shadow queries: by the rule of the variant. Causal Norefresh is plain causal attention over the shadow stream."""
        layout = self.layout
        if layout.history == "shadow":
            assert real_k_BGND is None and real_v_BGND is None, "Norefresh has no real stream in the parallel layers"
            if layout.block_attention == "causal":
                return self.real(q_BHND, k_BGND, v_BGND)
            return scaled_dot_product_attention(q_BHND, k_BGND, v_BGND, attn_mask=self._shadow_mask, enable_gqa=True)
        assert real_k_BGND is not None and real_v_BGND is not None, "Refresh reads the real stream"
        k_B_G_2N_D = torch.cat((real_k_BGND, k_BGND), dim=2)
        v_B_G_2N_D = torch.cat((real_v_BGND, v_BGND), dim=2)
        return scaled_dot_product_attention(q_BHND, k_B_G_2N_D, v_B_G_2N_D, attn_mask=self._shadow_mask, enable_gqa=True)

    def _mask(self, *, query_is_real: bool, key_is_real: bool) -> torch.Tensor:
        layout = self.layout
        mask_BNN = visible(
            query_is_real=torch.tensor(query_is_real),
            query_document=layout.documents_BN[:, :, None],
            query_position=layout.positions_BN[:, :, None],
            key_is_real=torch.tensor(key_is_real),
            key_document=layout.documents_BN[:, None, :],
            key_position=layout.positions_BN[:, None, :],
            cycle_length=layout.cycle_length,
            history=layout.history,
            block_attention=layout.block_attention,
        )
        return mask_BNN[:, None]

    @cached_property
    def _real_mask(self) -> torch.Tensor:
        return self._mask(query_is_real=True, key_is_real=True)

    @cached_property
    def _shadow_mask(self) -> torch.Tensor:
        own = self._mask(query_is_real=False, key_is_real=False)
        if self.layout.history == "shadow":
            return own
        return torch.cat((self._mask(query_is_real=False, key_is_real=True), own), dim=-1)
