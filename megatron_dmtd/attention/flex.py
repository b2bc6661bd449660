"""The flex backend: FlexAttention (arXiv 2412.05496) with a block mask from the visibility rule. The training backend on GPUs.

The kernel skips blocks in which nothing is visible, so its work and memory are proportional to the visible blocks; nothing of
size N x N is materialised. The block masks of a layout are made once, on the device, and serve all layers of the microbatch. The
forward pass also runs on CPUs, where the masks are tested; torch has no CPU backward pass for FlexAttention.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width, K keys (N or 2N).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_dmtd.attention.joined import JoinedKeysAttention
from megatron_dmtd.attention.protocol import StreamLayout
from megatron_dmtd.cycle.mask import MaskMod, causal_document_mask_mod, mask_mod, shadow_attention_slots

#: Compilations per function and process. Each kind of layer has its own strides, with and without gradients, so a Refresh model
#: needs eight, and eight is torch's default limit.
_MOST_COMPILATIONS = 64


@cache
def _compiled(function: Any) -> Any:
    """Compiled once per process. Never run eagerly, as torch would beyond its limit: that evaluates every pair of slots."""
    # torch's own overloads lack recompile_limit
    return torch.compile(function, dynamic=False, fullgraph=True, recompile_limit=_MOST_COMPILATIONS)  # type: ignore[call-overload]


class FlexAttention(JoinedKeysAttention[BlockMask]):
    """See `protocol.AttentionBackend`."""

    def __init__(self, layout: StreamLayout, *, compiled: bool = True) -> None:
        """With `compiled` false, the slow, quadratic reference implementation runs: for tests on CPUs."""
        super().__init__(layout)
        self._create_block_mask = _compiled(create_block_mask) if compiled else create_block_mask
        self._flex_attention = _compiled(flex_attention) if compiled else flex_attention

    def make_real_mask(self, window: int | None) -> BlockMask:
        """Causal inside each document."""
        documents_BN = self.layout.documents_BN
        slots = documents_BN.shape[1]
        return self._block_mask(causal_document_mask_mod(documents_BN, window=window), num_queries=slots, num_keys=slots)

    def make_shadow_mask(self, window: int | None) -> BlockMask:
        """The variant's rule."""
        layout = self.layout
        queries, keys = shadow_attention_slots(layout.documents_BN, layout.positions_BN, method=layout.method)
        rule = mask_mod(queries, keys, method=layout.method, window=window)
        return self._block_mask(rule, num_queries=queries.position.shape[1], num_keys=keys.position.shape[1])

    def attend(self, q_BHND: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        """FlexAttention over the blocks in which something is visible."""
        return self._flex_attention(q_BHND, k_BGKD, v_BGKD, block_mask=mask, enable_gqa=True)

    def _block_mask(self, visible_at: MaskMod, *, num_queries: int, num_keys: int) -> BlockMask:
        positions = self.layout.positions_BN
        return self._create_block_mask(
            visible_at, B=positions.shape[0], H=None, Q_LEN=num_queries, KV_LEN=num_keys, device=str(positions.device)
        )
