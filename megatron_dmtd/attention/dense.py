"""The dense backend: exact attention with torch's CPU kernels, document by document, in memory linear in the row's length.

Each document is attended to separately, so nothing is computed across documents. Consecutive short documents are grouped under
one small mask; a longer document needs no mask over its length: torch's causal attention where the rule is causal, and `merged`
for the shadow stream and for sliding windows, whose work is linear in the row's length too.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.attention.merged import merged_shadow_attention, windowed_causal_attention
from megatron_dmtd.attention.protocol import AttentionBackend, StreamLayout

#: maximum number of slots of short documents under one mask
TOGETHER = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive slots of one row that hold whole documents: one of any length, or several of at most `TOGETHER` slots."""

    slots: slice
    document_lengths: tuple[int, ...]


def segments(document_lengths: tuple[int, ...], *, most: int = TOGETHER) -> list[Segment]:
    """Divide a row between documents, so that each segment is one document or has at most `most` slots."""
    groups: list[list[int]] = []
    for length in document_lengths:
        if groups and sum(groups[-1]) + length <= most:
            groups[-1].append(length)
        else:
            groups.append([length])
    found, start = [], 0
    for group in groups:
        found.append(Segment(slots=slice(start, start + sum(group)), document_lengths=tuple(group)))
        start += sum(group)
    return found


class _OneDocument:
    """Rows that hold one document."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout

    def real(
        self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor, *, window: int | None = None
    ) -> torch.Tensor:
        if window is None or window >= q_BHND.shape[2]:
            return scaled_dot_product_attention(q_BHND, k_BGND, v_BGND, is_causal=True, enable_gqa=True)
        return windowed_causal_attention(q_BHND, k_BGND, v_BGND, window=window)

    def shadow(
        self,
        q_BHND: torch.Tensor,
        k_BGND: torch.Tensor,
        v_BGND: torch.Tensor,
        real_k_BGND: torch.Tensor | None,
        real_v_BGND: torch.Tensor | None,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        method = self.layout.method
        if method.shadow_is_causal:
            return self.real(q_BHND, k_BGND, v_BGND, window=window)
        return merged_shadow_attention(q_BHND, k_BGND, v_BGND, real_k_BGND, real_v_BGND, method=method, window=window)


class DenseAttention:
    """See `protocol.AttentionBackend`."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout

    def real(
        self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor, *, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention inside each document."""
        return self._by_segment(lambda backend, *streams: backend.real(*streams, window=window), q_BHND, k_BGND, v_BGND)

    def shadow(
        self,
        q_BHND: torch.Tensor,
        k_BGND: torch.Tensor,
        v_BGND: torch.Tensor,
        real_k_BGND: torch.Tensor | None,
        real_v_BGND: torch.Tensor | None,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Shadow queries: by the rule of the variant."""
        if real_k_BGND is None or real_v_BGND is None:
            assert self.layout.method.streams == ("shadow",), "this method has a real stream, which shadow queries read"
            return self._by_segment(
                lambda backend, *streams: backend.shadow(*streams, None, None, window=window), q_BHND, k_BGND, v_BGND
            )
        assert "real" in self.layout.method.streams, "this method has no real stream in the parallel layers"
        return self._by_segment(
            lambda backend, *streams: backend.shadow(*streams, window=window), q_BHND, k_BGND, v_BGND, real_k_BGND, real_v_BGND
        )

    @cached_property
    def _parts(self) -> list[tuple[slice, list[tuple[slice, AttentionBackend]]]]:
        """Groups of rows with equal layouts, each with its segments and their backends; masks are made once, for all layers."""
        layout = self.layout
        if layout.rows_are_alike:
            groups = [(slice(None), layout.document_lengths[0])]
        else:
            groups = [(slice(row, row + 1), lengths) for row, lengths in enumerate(layout.document_lengths)]
        return [(rows, [(part.slots, self._serve(rows, part)) for part in segments(lengths)]) for rows, lengths in groups]

    def _serve(self, rows: slice, segment: Segment) -> AttentionBackend:
        part = self.layout.part(rows, segment.slots, segment.document_lengths)
        return _OneDocument(part) if len(segment.document_lengths) == 1 else MaskedAttention(part)

    def _by_segment(self, attend: Callable[..., torch.Tensor], *streams: torch.Tensor) -> torch.Tensor:
        rows_out = []
        for rows, parts in self._parts:
            out = [attend(backend, *(stream[rows, :, slots] for stream in streams)) for slots, backend in parts]
            rows_out.append(out[0] if len(out) == 1 else torch.cat(out, dim=2))
        return rows_out[0] if len(rows_out) == 1 else torch.cat(rows_out)
