"""Attention of one document without a mask over the whole document: shadow streams, and sliding windows.

In bidirectional Norefresh a query sees the whole cycles of its stream up to and including its own. In Refresh it sees the real
stream up to the cycle before its own, which is the same attention between all queries except the first cycle's and all real keys
except the last cycle's. In addition it sees its own cycle of the shadow stream, which is a separate, small attention. Causal
attention is the first of these with cycles of one slot.

The history is processed in chunks of queries: all keys before the chunk without a mask, and the keys inside it under a small mask
that is the same for every chunk, because chunks begin at cycle boundaries. Under a sliding window a chunk reads the slice of keys
that it may see, under one mask that is the same for every chunk. The own cycles of a whole document take one call.

Partial results are merged by their log-sum-exp (arXiv 1805.02867, arXiv 2205.14135). The backward kernel needs only the merged
output and log-sum-exp to compute each part's exact gradient, so it is called once per part. Memory grows linearly with the length
of the document; under a window so does the work.

CPU only: it calls the CPU kernels under torch's scaled-dot-product attention, which return the log-sum-exp.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, M = H / G query heads per key/value head, D head width,
Q queries and K keys of one chunk or block, J blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from megatron_dmtd.cycle.geometry import Slots
from megatron_dmtd.cycle.mask import dense_mask, stream_slots
from megatron_dmtd.cycle.method import Method
from megatron_dmtd.cycle.rule import complete_length

#: slots per chunk of the history, before rounding to whole cycles: the fastest of 64 to 512 at 4,096 slots on two cores (with
#: three query heads per key head it is the smallest for which torch's kernel works on 256 queries at a time); none is faster at
#: 1,024
CHUNK = 256
#: slots of one block: own cycles that are computed as one row of a batch, before rounding
BLOCK = 32

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _additive(queries: Slots, keys: Slots, method: Method, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    mask_QK = dense_mask(queries, keys, method=method, window=window)
    return torch.zeros(mask_QK.shape, dtype=dtype).masked_fill_(~mask_QK, float("-inf"))


def _shadow_slots(position: torch.Tensor, *, cycle_length: int = 0) -> Slots:
    """Shadow slots of one document, or, with a cycle length, of one document for each cycle."""
    document = position // cycle_length if cycle_length else torch.zeros_like(position)
    return stream_slots(document, position, is_real=False)


@lru_cache(maxsize=256)
def _history_mask(length: int, repeats: int, dtype: torch.dtype, method: Method) -> torch.Tensor:
    """Additive mask [M Q, Q] of `length` slots from a cycle head."""
    slots = _shadow_slots(torch.arange(length))
    return _additive(slots, slots, method, None, dtype).repeat(repeats, 1)


@lru_cache(maxsize=256)
def _own_cycles_mask(length: int, repeats: int, dtype: torch.dtype, method: Method, window: int | None) -> torch.Tensor:
    """Additive mask [M Q, Q] of `length` slots from a cycle head, within cycles only."""
    slots = _shadow_slots(torch.arange(length), cycle_length=method.cycle_length)
    return _additive(slots, slots, method, window, dtype).repeat(repeats, 1)


@lru_cache(maxsize=16)
def _window_mask(length: int, reach: int, dtype: torch.dtype, method: Method) -> torch.Tensor:
    """Additive mask [Q, K] of `length` queries from a cycle head, and of all keys that any of them may see.

    The first key lies `reach - 1` slots before the first query, the last key is the last query's own slot.
    """
    queries, keys = torch.arange(length), torch.arange(1 - reach, length)
    return _additive(_shadow_slots(queries), _shadow_slots(keys), method, reach, dtype)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attentions of the same queries to different keys, merged into one; both outputs are overwritten."""
    total = torch.logaddexp(lse, other_lse)
    for part, part_lse in ((out, lse), (other_out, other_lse)):
        part *= (part_lse - total).exp_()[..., None].to(part.dtype)
    return out.add_(other_out), total


class _History:
    """Attention of N queries to N keys of one stream, by whole cycles; [B, G, M, N, D]."""

    def __init__(self, cycle_length: int, reach: int | None) -> None:
        """A query sees keys less than `reach` slots before its own slot; None: all of them.

        Where queries and keys are a cycle apart, `reach` may be zero or negative: then it leaves keys of the query's cycle only.
        """
        self.rule = Method(variant="bidirectional-norefresh", cycle_length=cycle_length, num_parallel_layers=1)
        self.reach = reach
        self.chunk = complete_length(CHUNK, cycle_length)

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return self.reach is not None and self.reach <= 1 - self.rule.cycle_length

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:4], dtype=torch.promote_types(q.dtype, torch.float32))
        for chunk in self._chunks(q):
            query = _folded(q, chunk)
            (first, mask), *others = self._parts(query, chunk)
            part = _forward(query, k[:, :, first], v[:, :, first], attn_mask=mask)
            if self.reach is not None and self.reach < 1:
                _hide_unseeing(part[1], mask)
            for keys, _ in others:
                part = _merged(*part, *_forward(query, k[:, :, keys], v[:, :, keys]))
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
            parts_q = []
            for keys, mask in self._parts(query, chunk):
                part_q, part_k, part_v = _backward(above, query, k[:, :, keys], v[:, :, keys], *saved, attn_mask=mask)
                parts_q.append(part_q)
                grad_k[:, :, keys] += part_k
                grad_v[:, :, keys] += part_v
            _unfold(grad_q, chunk, sum(parts_q[1:], start=parts_q[0]))
        return [grad_q, grad_k, grad_v]

    def _chunks(self, q: torch.Tensor) -> list[slice]:
        slots = q.shape[3]
        return [slice(start, min(start + self.chunk, slots)) for start in range(0, slots, self.chunk)]

    def _parts(self, query: torch.Tensor, chunk: slice) -> list[tuple[slice, torch.Tensor | None]]:
        """The keys that a chunk sees, each slice with its mask; the first slice holds the chunk's own slots."""
        length = chunk.stop - chunk.start
        repeats = query.shape[2] // length
        if self.reach is None or chunk.stop <= self.reach:  # the window hides nothing here
            own = (chunk, _history_mask(length, repeats, query.dtype, self.rule))
            return [own, (slice(0, chunk.start), None)] if chunk.start > 0 else [own]
        before = chunk.start + 1 - self.reach
        first = max(0, before)
        mask_QK = _window_mask(self.chunk, self.reach, query.dtype, self.rule)
        mask_QK = mask_QK[:length, first - before : mask_QK.shape[1] - (self.chunk - length)]
        return [(slice(first, chunk.stop), mask_QK.repeat(repeats, 1))]


def _hide_unseeing(lse: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Give queries that see nothing a log-sum-exp of minus infinity. The kernel's is 0; so are its output and gradients."""
    assert mask is not None, "a window that hides keys has a mask"
    lse.masked_fill_(mask.isneginf().all(dim=-1), float("-inf"))


def _folded(x_BGMN: torch.Tensor, chunk: slice) -> torch.Tensor:
    """A chunk with its query heads folded into the slots, so that each key head is read only once: [B, G, M Q, ...]."""
    return x_BGMN[:, :, :, chunk].flatten(2, 3).contiguous()


def _unfold(x_BGMN: torch.Tensor, chunk: slice, part: torch.Tensor) -> None:
    into = x_BGMN[:, :, :, chunk]
    into.copy_(part.view(into.shape))


class _OwnCycles:
    """Attention of N queries to the keys of their own cycles; [B, G, M, N, D]. Blocks of a few cycles are rows of one call."""

    def __init__(self, method: Method, window: int | None) -> None:
        self.rule = Method(
            variant="bidirectional-norefresh" if method.is_bidirectional else "causal-norefresh",
            cycle_length=method.cycle_length,
            num_parallel_layers=1,
        )
        self.window = window if window is not None and window < method.cycle_length else None
        self.block = complete_length(BLOCK, method.cycle_length)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp."""
        parts = []
        for stretch, length in self._stretches(q):
            query = _blocks(q, stretch, length)
            keys, values = (_blocks(x[:, :, None], stretch, length) for x in (k, v))
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
            above, query, result, log_sum = (_blocks(x, stretch, length) for x in (upstream, q, out, lse))
            keys, values = (_blocks(x[:, :, None], stretch, length) for x in (k, v))
            mask = self._mask(query, length)
            part_q, part_k, part_v = _backward(above, query, keys, values, result, log_sum, 0.0, False, attn_mask=mask)
            key_shape = (*k.shape[:2], 1)
            grad_k, grad_v = (_joined(x, key_shape, length)[:, :, 0] for x in (part_k, part_v))
            parts.append([_joined(part_q, q.shape[:3], length), grad_k, grad_v])
        return parts[0] if len(parts) == 1 else [torch.cat(part, dim=-2) for part in zip(*parts, strict=True)]

    def _stretches(self, q: torch.Tensor) -> list[tuple[slice, int]]:
        """Slots in blocks of equal length, and the remainder as one shorter block."""
        slots = q.shape[3]
        whole = slots - slots % self.block
        stretches = [(slice(0, whole), self.block), (slice(whole, slots), slots - whole)]
        return [(stretch, length) for stretch, length in stretches if stretch.stop > stretch.start]

    def _mask(self, query: torch.Tensor, length: int) -> torch.Tensor:
        return _own_cycles_mask(length, query.shape[2] // length, query.dtype, self.rule, self.window)


def _blocks(x_BGMN: torch.Tensor, stretch: slice, length: int) -> torch.Tensor:
    """[B J, G, M Q, ...]: blocks as rows, query heads folded into the slots."""
    x_BGMJQ = x_BGMN[:, :, :, stretch].unflatten(3, (-1, length))
    return x_BGMJQ.movedim(3, 1).flatten(3, 4).flatten(0, 1).contiguous()


def _joined(x: torch.Tensor, shape: tuple[int, ...], length: int) -> torch.Tensor:
    """The inverse of `_blocks`; `shape` is (B, G, M)."""
    rows, _, heads = shape
    return x.unflatten(2, (heads, length)).unflatten(0, (rows, -1)).movedim(1, 3).flatten(3, 4)


class _HistoryAttention(torch.autograd.Function):
    """One stream that sees itself by whole cycles."""

    @staticmethod
    def forward(ctx: Any, q_BGMND: Any, k_BGND: Any, v_BGND: Any, history: _History) -> Any:
        out, lse = history.forward(q_BGMND, k_BGND, v_BGND)
        ctx.save_for_backward(q_BGMND, k_BGND, v_BGND, out, lse)
        ctx.history = history
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return *ctx.history.backward(upstream, *ctx.saved_tensors), None


class _RefreshAttention(torch.autograd.Function):
    """Refresh: a shadow stream over its own cycles and the real stream's earlier ones, one cycle behind."""

    @staticmethod
    def forward(ctx: Any, q_BGMND: Any, real_k_BGND: Any, real_v_BGND: Any, k_BGND: Any, v_BGND: Any, parts: Any) -> Any:
        history, own = parts
        out, lse = own.forward(q_BGMND, k_BGND, v_BGND)
        if not history.is_empty:
            later, earlier = _a_cycle_apart(q_BGMND, history.rule.cycle_length)
            far = history.forward(q_BGMND[:, :, :, later], real_k_BGND[:, :, earlier], real_v_BGND[:, :, earlier])
            lse[:, :, :, later] = _merged(out[:, :, :, later], lse[:, :, :, later], *far)[1]
        ctx.save_for_backward(q_BGMND, real_k_BGND, real_v_BGND, k_BGND, v_BGND, out, lse)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        q, real_k, real_v, k, v, out, lse = ctx.saved_tensors
        history, own = ctx.parts
        grad_q, grad_k, grad_v = own.backward(upstream, q, k, v, out, lse)
        if history.is_empty:
            return grad_q, torch.zeros_like(real_k), torch.zeros_like(real_v), grad_k, grad_v, None
        later, earlier = _a_cycle_apart(q, history.rule.cycle_length)
        far_q, *far = history.backward(
            *(x[:, :, :, later] for x in (upstream, q)),
            *(x[:, :, earlier] for x in (real_k, real_v)),
            *(x[:, :, :, later] for x in (out, lse)),
        )
        grad_q[:, :, :, later] += far_q
        unread = (0, 0, 0, history.rule.cycle_length)
        grad_real_k, grad_real_v = (torch.nn.functional.pad(grad, unread) for grad in far)
        return grad_q, grad_real_k, grad_real_v, grad_k, grad_v, None


def _a_cycle_apart(q_BGMND: torch.Tensor, cycle_length: int) -> tuple[slice, slice]:
    """The queries that have a history, and the slots that are history to some query."""
    slots = q_BGMND.shape[3]
    return slice(cycle_length, slots), slice(0, slots - cycle_length)


def _by_group(q_BHND: torch.Tensor, k_BGND: torch.Tensor) -> torch.Tensor:
    return q_BHND.unflatten(1, (k_BGND.shape[1], -1))


def windowed_causal_attention(q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor, *, window: int) -> torch.Tensor:
    """Causal attention of one document, of each query to the last `window` keys at most; [B, H, N, D]."""
    history = _History(cycle_length=1, reach=window)
    return _HistoryAttention.apply(_by_group(q_BHND, k_BGND), k_BGND, v_BGND, history).flatten(1, 2)


def merged_shadow_attention(
    q_BHND: torch.Tensor,
    k_BGND: torch.Tensor,
    v_BGND: torch.Tensor,
    real_k_BGND: torch.Tensor | None,
    real_v_BGND: torch.Tensor | None,
    *,
    method: Method,
    window: int | None,
) -> torch.Tensor:
    """Shadow attention of one document of N slots, from its position 0; [B, H, N, D]. See `protocol.AttentionBackend.shadow`.

    Not for methods whose `shadow_is_causal`: theirs is ordinary causal attention.
    """
    q_BGMND, cycle_length = _by_group(q_BHND, k_BGND), method.cycle_length
    if real_k_BGND is None:
        assert method.streams == ("shadow",) and not method.shadow_is_causal, method
        return _HistoryAttention.apply(q_BGMND, k_BGND, v_BGND, _History(cycle_length, window)).flatten(1, 2)
    # Queries and real keys are a cycle apart, so the same window reaches a cycle less far.
    history = _History(cycle_length, None if window is None else window - cycle_length)
    parts = history, _OwnCycles(method, window)
    return _RefreshAttention.apply(q_BGMND, real_k_BGND, real_v_BGND, k_BGND, v_BGND, parts).flatten(1, 2)
