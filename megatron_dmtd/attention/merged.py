"""Attention of one document's shadow stream in chunks, without a mask over the whole document.

A chunk of queries sees every history key before the chunk, with no mask, and what lies inside the chunk by a small mask that is
the same for every chunk: chunks begin with a cycle, and visibility depends on cycles alone. The two partial results are merged
by their log-sum-exp (Milakov and Gimelshein 2018; Dao et al. 2022). The backward kernel needs only the merged output and log-
sum-exp to give each part its exact gradient, so it is called once per part. Memory grows with the document's length, not with
its square.

CPU only: it calls the kernels under torch's scaled-dot-product attention there, which return the log-sum-exp.

Shape legend: B rows, G key-value heads, R query heads per key-value head, N slots, D head width, L slots of one chunk, K keys
of one chunk's diagonal (L, or 2L for Refresh).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from megatron_dmtd.cycle import complete_length
from megatron_dmtd.cycle.mask import dense_mask, shadow_attention_slots

#: slots per chunk, before rounding to whole cycles: the fastest of 32 to 512 at 1,024 to 4,096 slots on two cores
CHUNK = 128

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@lru_cache(maxsize=256)
def _diagonal_mask(
    length: int, repeats: int, dtype: torch.dtype, *, cycle_length: int, history: str, block_attention: str
) -> torch.Tensor:
    """Additive mask [R L, K] of a chunk of `length` slots that begins with a cycle."""
    position_L = torch.arange(length)
    queries, keys = shadow_attention_slots(torch.zeros_like(position_L), position_L, history=history)
    mask_LK = dense_mask(queries, keys, cycle_length=cycle_length, history=history, block_attention=block_attention)
    return torch.zeros(mask_LK.shape, dtype=dtype).masked_fill_(~mask_LK, float("-inf")).repeat(repeats, 1)


class _MergedAttention(torch.autograd.Function):
    """`own_*` are None for Norefresh, whose shadow stream is its own history."""

    @staticmethod
    def forward(ctx: Any, q_BGRND: Any, k_BGND: Any, v_BGND: Any, own_k_BGND: Any, own_v_BGND: Any, rule: Any) -> Any:
        out_BGRND, lse_BGRN = (
            torch.empty_like(q_BGRND),
            q_BGRND.new_empty(q_BGRND.shape[:4], dtype=torch.promote_types(q_BGRND.dtype, torch.float32)),
        )
        for chunk in _chunks(q_BGRND.shape[3], rule["cycle_length"]):
            query = _folded(q_BGRND, chunk)
            out, lse = _forward(
                query, *_diagonal(chunk, k_BGND, v_BGND, own_k_BGND, own_v_BGND), attn_mask=_mask(query, chunk, rule)
            )
            if chunk.start > 0:
                before = slice(0, chunk.start)
                far_out, far_lse = _forward(query, k_BGND[:, :, before], v_BGND[:, :, before])
                total = torch.logaddexp(lse, far_lse)
                out = out * (lse - total).exp()[..., None].to(out.dtype) + far_out * (far_lse - total).exp()[..., None].to(
                    out.dtype
                )
                lse = total
            _unfolded(out_BGRND, chunk).copy_(out.view(_unfolded(out_BGRND, chunk).shape))
            _unfolded(lse_BGRN, chunk).copy_(lse.view(_unfolded(lse_BGRN, chunk).shape))
        ctx.save_for_backward(q_BGRND, k_BGND, v_BGND, own_k_BGND, own_v_BGND, out_BGRND, lse_BGRN)
        ctx.rule = rule
        return out_BGRND

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        q, k, v, own_k, own_v, out, lse = ctx.saved_tensors
        grads: list[Any] = [torch.zeros_like(x) if x is not None else None for x in (q, k, v, own_k, own_v)]
        grad_q, grad_k, grad_v, grad_own_k, grad_own_v = grads
        for chunk in _chunks(q.shape[3], ctx.rule["cycle_length"]):
            query, saved = _folded(q, chunk), (_folded(out, chunk), _folded(lse, chunk), 0.0, False)
            upstream = _folded(grad_out, chunk)
            length = chunk.stop - chunk.start
            diagonal = _diagonal(chunk, k, v, own_k, own_v)
            part_q, part_k, part_v = _backward(upstream, query, *diagonal, *saved, attn_mask=_mask(query, chunk, ctx.rule))
            grad_k[:, :, chunk] += part_k[:, :, :length]
            grad_v[:, :, chunk] += part_v[:, :, :length]
            if own_k is not None:
                grad_own_k[:, :, chunk] += part_k[:, :, length:]
                grad_own_v[:, :, chunk] += part_v[:, :, length:]
            if chunk.start > 0:
                before = slice(0, chunk.start)
                far_q, far_k, far_v = _backward(upstream, query, k[:, :, before], v[:, :, before], *saved)
                part_q = part_q + far_q
                grad_k[:, :, before] += far_k
                grad_v[:, :, before] += far_v
            _unfolded(grad_q, chunk).copy_(part_q.view(_unfolded(grad_q, chunk).shape))
        return *grads, None


def _chunks(slots: int, cycle_length: int) -> list[slice]:
    size = complete_length(CHUNK, cycle_length)
    return [slice(start, min(start + size, slots)) for start in range(0, slots, size)]


def _unfolded(x_BGRN: torch.Tensor, chunk: slice) -> torch.Tensor:
    return x_BGRN[:, :, :, chunk]


def _folded(x_BGRN: torch.Tensor, chunk: slice) -> torch.Tensor:
    """A chunk with its query heads folded into the slots, so that each key head is read once: [B, G, R L, ...]."""
    return _unfolded(x_BGRN, chunk).flatten(2, 3).contiguous()


def _diagonal(
    chunk: slice, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor | None, own_v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if own_k is None or own_v is None:
        return k[:, :, chunk], v[:, :, chunk]
    return torch.cat((k[:, :, chunk], own_k[:, :, chunk]), dim=2), torch.cat((v[:, :, chunk], own_v[:, :, chunk]), dim=2)


def _mask(query: torch.Tensor, chunk: slice, rule: dict[str, Any]) -> torch.Tensor:
    length = chunk.stop - chunk.start
    return _diagonal_mask(length, query.shape[2] // length, query.dtype, **rule)


def merged_shadow_attention(
    q_BHND: torch.Tensor,
    k_BGND: torch.Tensor,
    v_BGND: torch.Tensor,
    real_k_BGND: torch.Tensor | None,
    real_v_BGND: torch.Tensor | None,
    *,
    cycle_length: int,
    history: str,
    block_attention: str,
) -> torch.Tensor:
    """Shadow attention of one document of N slots, from its position 0; [B, H, N, D]. See `protocol.AttentionBackend.shadow`."""
    rule = {"cycle_length": cycle_length, "history": history, "block_attention": block_attention}
    q_BGRND = q_BHND.unflatten(1, (k_BGND.shape[1], -1))
    if history == "shadow":
        return _MergedAttention.apply(q_BGRND, k_BGND, v_BGND, None, None, rule).flatten(1, 2)
    return _MergedAttention.apply(q_BGRND, real_k_BGND, real_v_BGND, k_BGND, v_BGND, rule).flatten(1, 2)
