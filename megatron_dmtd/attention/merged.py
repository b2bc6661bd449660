"""Attention of one document's shadow stream, without a mask over the whole document.

In bidirectional Norefresh a query sees the whole cycles of its stream up to and including its own. In Refresh it sees the real
stream up to the cycle before its own, which is the same attention between all queries except the first cycle's and all real keys
except the last cycle's. In addition it sees its own cycle of the shadow stream, which is a separate, small attention.

The history is processed in chunks of queries: all keys before the chunk without a mask, and the keys inside it under a small mask
that is the same for every chunk, because chunks begin at cycle boundaries. The own cycles of a whole document take one call.
Partial results are merged by their log-sum-exp (arXiv 1805.02867, arXiv 2205.14135). The backward kernel needs only the merged
output and log-sum-exp to compute each part's exact gradient, so it is called once per part. Memory grows linearly with the length
of the document.

CPU only: it calls the CPU kernels beneath torch's scaled-dot-product attention, which return the log-sum-exp.

Shape legend: B rows, G key-value heads, R query heads per key-value head, N slots, D head width, L slots of one chunk or window,
W windows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from megatron_dmtd.cycle import complete_length
from megatron_dmtd.cycle.mask import dense_mask, shadow_attention_slots

#: slots per chunk of the history, before rounding to whole cycles: the fastest of 64 to 512 at 4,096 slots on two cores (with
#: three query heads per key head it is the smallest for which torch's kernel works on 256 queries at a time); none is faster at
#: 1,024
CHUNK = 256
#: slots whose own cycles are computed in one attention window, before rounding
WINDOW = 32

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@lru_cache(maxsize=256)
def _mask(
    length: int, repeats: int, dtype: torch.dtype, *, cycle_length: int, block_attention: str, own: bool = False
) -> torch.Tensor:
    """Additive mask [R L, L] of `length` slots from a cycle head: by the rule of Norefresh, or within cycles only (`own`)."""
    position_L = torch.arange(length)
    document_L = position_L // cycle_length if own else torch.zeros_like(position_L)
    queries, keys = shadow_attention_slots(document_L, position_L, history="shadow")
    mask_LL = dense_mask(queries, keys, cycle_length=cycle_length, history="shadow", block_attention=block_attention)
    return torch.zeros(mask_LL.shape, dtype=dtype).masked_fill_(~mask_LL, float("-inf")).repeat(repeats, 1)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attentions of the same queries to different keys, merged into one; both outputs are overwritten."""
    total = torch.logaddexp(lse, other_lse)
    for part, part_lse in ((out, lse), (other_out, other_lse)):
        part *= (part_lse - total).exp_()[..., None].to(part.dtype)
    return out.add_(other_out), total


class _History:
    """Attention of N queries to N keys of one stream, by whole cycles; [B, G, R, N, D]."""

    def __init__(self, cycle_length: int) -> None:
        self.cycle_length = cycle_length

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:4], dtype=torch.promote_types(q.dtype, torch.float32))
        for chunk in self._chunks(q):
            query = _folded(q, chunk)
            part = _forward(query, k[:, :, chunk], v[:, :, chunk], attn_mask=self._mask(query, chunk))
            if chunk.start > 0:
                before = slice(0, chunk.start)
                part = _merged(*part, *_forward(query, k[:, :, before], v[:, :, before]))
            for whole, found in zip((out, lse), part, strict=True):
                _unfold(whole, chunk, found)
        return out, lse

    def backward(
        self, upstream: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> list[torch.Tensor]:
        """Gradients of q, k and v, from the output and log-sum-exp of all that was merged."""
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for chunk in self._chunks(q):
            query, saved = _folded(q, chunk), (_folded(out, chunk), _folded(lse, chunk), 0.0, False)
            above = _folded(upstream, chunk)
            part_q, part_k, part_v = _backward(
                above, query, k[:, :, chunk], v[:, :, chunk], *saved, attn_mask=self._mask(query, chunk)
            )
            grad_k[:, :, chunk] += part_k
            grad_v[:, :, chunk] += part_v
            if chunk.start > 0:
                before = slice(0, chunk.start)
                far_q, far_k, far_v = _backward(above, query, k[:, :, before], v[:, :, before], *saved)
                part_q += far_q
                grad_k[:, :, before] += far_k
                grad_v[:, :, before] += far_v
            _unfold(grad_q, chunk, part_q)
        return [grad_q, grad_k, grad_v]

    def _chunks(self, q: torch.Tensor) -> list[slice]:
        slots, size = q.shape[3], complete_length(CHUNK, self.cycle_length)
        return [slice(start, min(start + size, slots)) for start in range(0, slots, size)]

    def _mask(self, query: torch.Tensor, chunk: slice) -> torch.Tensor:
        length = chunk.stop - chunk.start
        return _mask(
            length,
            query.shape[2] // length,
            query.dtype,
            cycle_length=self.cycle_length,
            block_attention="bidirectional",
        )


def _folded(x_BGRN: torch.Tensor, chunk: slice) -> torch.Tensor:
    """A chunk with its query heads folded into the slots, so that each key head is read only once: [B, G, R L, ...]."""
    return x_BGRN[:, :, :, chunk].flatten(2, 3).contiguous()


def _unfold(x_BGRN: torch.Tensor, chunk: slice, part: torch.Tensor) -> None:
    into = x_BGRN[:, :, :, chunk]
    into.copy_(part.view(into.shape))


class _OwnCycles:
    """Attention of N queries to the keys of their own cycles; [B, G, R, N, D]. Windows of a few cycles are rows of one call."""

    def __init__(self, cycle_length: int, block_attention: str) -> None:
        self.rule = {"cycle_length": cycle_length, "block_attention": block_attention, "own": True}
        self.window = complete_length(WINDOW, cycle_length)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp."""
        parts = []
        for stretch, length in self._stretches(q):
            query = _windows(q, stretch, length)
            keys, values = (_windows(x[:, :, None], stretch, length) for x in (k, v))
            found = _forward(query, keys, values, attn_mask=self._mask(query, length))
            parts.append([_joined(x, q.shape[:3], length) for x in found])
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(part, dim=3) for part in zip(*parts, strict=True))
        return out, lse

    def backward(
        self, upstream: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> list[torch.Tensor]:
        """Gradients of q, k and v, from the output and log-sum-exp of all that was merged."""
        parts = []
        for stretch, length in self._stretches(q):
            above, query, result, log_sum = (_windows(x, stretch, length) for x in (upstream, q, out, lse))
            keys, values = (_windows(x[:, :, None], stretch, length) for x in (k, v))
            mask = self._mask(query, length)
            part_q, part_k, part_v = _backward(above, query, keys, values, result, log_sum, 0.0, False, attn_mask=mask)
            key_shape = (*k.shape[:2], 1)
            grad_k, grad_v = (_joined(x, key_shape, length)[:, :, 0] for x in (part_k, part_v))
            parts.append([_joined(part_q, q.shape[:3], length), grad_k, grad_v])
        return parts[0] if len(parts) == 1 else [torch.cat(part, dim=-2) for part in zip(*parts, strict=True)]

    def _stretches(self, q: torch.Tensor) -> list[tuple[slice, int]]:
        """Slots in windows of equal length, and the remainder as one shorter window."""
        slots = q.shape[3]
        whole = slots - slots % self.window
        stretches = [(slice(0, whole), self.window), (slice(whole, slots), slots - whole)]
        return [(stretch, length) for stretch, length in stretches if stretch.stop > stretch.start]

    def _mask(self, query: torch.Tensor, length: int) -> torch.Tensor:
        return _mask(length, query.shape[2] // length, query.dtype, **self.rule)


def _windows(x_BGRN: torch.Tensor, stretch: slice, length: int) -> torch.Tensor:
    """[B W, G, R L, ...]: windows as rows, query heads folded into the slots."""
    x_BGRWL = x_BGRN[:, :, :, stretch].unflatten(3, (-1, length))
    return x_BGRWL.movedim(3, 1).flatten(3, 4).flatten(0, 1).contiguous()


def _joined(x: torch.Tensor, shape: tuple[int, ...], length: int) -> torch.Tensor:
    """The inverse of `_windows`; `shape` is (B, G, R)."""
    rows, _, heads = shape
    return x.unflatten(2, (heads, length)).unflatten(0, (rows, -1)).movedim(1, 3).flatten(3, 4)


class _HistoryAttention(torch.autograd.Function):
    """Bidirectional Norefresh."""

    @staticmethod
    def forward(ctx: Any, q_BGRND: Any, k_BGND: Any, v_BGND: Any, history: _History) -> Any:
        out, lse = history.forward(q_BGRND, k_BGND, v_BGND)
        ctx.save_for_backward(q_BGRND, k_BGND, v_BGND, out, lse)
        ctx.history = history
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return *ctx.history.backward(upstream, *ctx.saved_tensors), None


class _RefreshAttention(torch.autograd.Function):
    """Refresh: the shadow stream attends to its own cycles, and to the real stream up to the cycle before."""

    @staticmethod
    def forward(ctx: Any, q_BGRND: Any, real_k_BGND: Any, real_v_BGND: Any, k_BGND: Any, v_BGND: Any, parts: Any) -> Any:
        history, own = parts
        later, earlier = _a_cycle_apart(q_BGRND, history.cycle_length)
        out, lse = own.forward(q_BGRND, k_BGND, v_BGND)
        far = history.forward(q_BGRND[:, :, :, later], real_k_BGND[:, :, earlier], real_v_BGND[:, :, earlier])
        lse[:, :, :, later] = _merged(out[:, :, :, later], lse[:, :, :, later], *far)[1]
        ctx.save_for_backward(q_BGRND, real_k_BGND, real_v_BGND, k_BGND, v_BGND, out, lse)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        q, real_k, real_v, k, v, out, lse = ctx.saved_tensors
        history, own = ctx.parts
        later, earlier = _a_cycle_apart(q, history.cycle_length)
        grad_q, grad_k, grad_v = own.backward(upstream, q, k, v, out, lse)
        far_q, *far = history.backward(
            *(x[:, :, :, later] for x in (upstream, q)),
            *(x[:, :, earlier] for x in (real_k, real_v)),
            *(x[:, :, :, later] for x in (out, lse)),
        )
        grad_q[:, :, :, later] += far_q
        unread = (0, 0, 0, history.cycle_length)
        grad_real_k, grad_real_v = (torch.nn.functional.pad(grad, unread) for grad in far)
        return grad_q, grad_real_k, grad_real_v, grad_k, grad_v, None


def _a_cycle_apart(q_BGRND: torch.Tensor, cycle_length: int) -> tuple[slice, slice]:
    """The queries that have a history, and the slots that are history to some query."""
    slots = q_BGRND.shape[3]
    return slice(cycle_length, slots), slice(0, slots - cycle_length)


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
    """Shadow attention of one document of N slots, from its position 0; [B, H, N, D]. See `protocol.AttentionBackend.shadow`.

    For all variants except causal Norefresh, which is plain causal attention.
    """
    q_BGRND = q_BHND.unflatten(1, (k_BGND.shape[1], -1))
    whole_cycles = _History(cycle_length)
    if history == "shadow":
        assert block_attention == "bidirectional", block_attention
        return _HistoryAttention.apply(q_BGRND, k_BGND, v_BGND, whole_cycles).flatten(1, 2)
    parts = whole_cycles, _OwnCycles(cycle_length, block_attention)
    return _RefreshAttention.apply(q_BGRND, real_k_BGND, real_v_BGND, k_BGND, v_BGND, parts).flatten(1, 2)
