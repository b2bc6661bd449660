"""The te backend: Transformer Engine's attention with an arbitrary mask. The only module that imports Transformer Engine.

TE handles an arbitrary mask with its unfused kernel, which materialises the whole score matrix: B x H x N x 2N numbers per layer.
This backend says so and refuses rows that cannot fit; `flex` has no such limit. It has not run where this project is tested (no
CUDA): see docs/verification.md.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width, K keys (N or 2N).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.errors import CapabilityError


def require_transformer_engine() -> None:
    """Raise `CapabilityError` if Transformer Engine cannot run: it needs its package and a CUDA device."""
    missing = []
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("no package transformer_engine")
    if not torch.cuda.is_available():
        missing.append("no CUDA device")
    if missing:
        raise CapabilityError(
            found="parallel.attention_backend = te with " + " and ".join(missing),
            required="Transformer Engine on a GPU",
            remedy="install transformer-engine[pytorch] there (or use NVIDIA's PyTorch container), or use flex or dense",
        )


def score_bytes(*, rows: int, heads: int, slots: int, keys: int, bytes_per_score: int) -> int:
    """Memory of one layer's scores, softmax and mask."""
    return rows * slots * keys * (2 * heads * bytes_per_score + 1)


def free_bytes(device: torch.device) -> int:
    """What the driver reports as free plus what torch's allocator caches unused: after a first step, nearly everything."""
    driver, _ = torch.cuda.mem_get_info(device)
    return driver + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def require_memory(needed: int, available: int, *, slots: int) -> None:
    """Raise `CapabilityError` if one layer's scores do not fit."""
    if needed > available:
        raise CapabilityError(
            found=f"rows of {slots} slots, whose scores take {needed / 2**30:.1f} GiB per layer; "
            f"{available / 2**30:.1f} GiB are free",
            required="scores of one layer that fit: Transformer Engine computes an arbitrary mask without fusion",
            remedy="use parallel.attention_backend flex, shorter rows (data.seq_length), or fewer rows per pass",
        )


class TransformerEngineAttention(MaskedAttention):
    """See `protocol.AttentionBackend`. The masks are those of the masked backend."""

    def attend(self, q_BHND: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Transformer Engine's attention with an arbitrary mask."""
        from transformer_engine.pytorch import DotProductAttention

        rows, heads, slots, width = q_BHND.shape
        needed = score_bytes(rows=rows, heads=heads, slots=slots, keys=k_BGKD.shape[2], bytes_per_score=q_BHND.element_size())
        require_memory(needed, free_bytes(q_BHND.device), slots=slots)
        attend: Any = DotProductAttention(
            num_attention_heads=heads,
            kv_channels=width,
            num_gqa_groups=k_BGKD.shape[1],
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="arbitrary",
        )
        q_BNHD, k_BKGD, v_BKGD = (x.transpose(1, 2).contiguous() for x in (q_BHND, k_BGKD, v_BGKD))
        # In TE's masks true means hidden.
        out = attend(q_BNHD, k_BKGD, v_BKGD, attention_mask=~mask, attn_mask_type="arbitrary")
        return out.view(rows, slots, heads, width).transpose(1, 2)
