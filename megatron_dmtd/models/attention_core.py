"""The attention core of a layer: from Megatron's [s, b, heads, width] to a backend's streams and back.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width; Megatron's b holds the rows of all streams
(see `streams`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.module import MegatronModule

from megatron_dmtd.architecture import AttentionSpec, Stream
from megatron_dmtd.architecture.rotary import attention_factor
from megatron_dmtd.models.streams import VisitStreams

_Keys = dict[Stream, tuple[torch.Tensor, torch.Tensor]]


def _to_backend(x_sbhd: torch.Tensor) -> torch.Tensor:
    return x_sbhd.permute(1, 2, 0, 3)


def _from_backend(x_BHND: torch.Tensor) -> torch.Tensor:
    b, h, n, d = x_BHND.shape
    return x_BHND.permute(2, 0, 1, 3).reshape(n, b, h * d)


class StreamAttentionCore(MegatronModule):
    """Replaces Megatron's DotProductAttention: rotates queries and keys, then each stream attends."""

    def __init__(self, config: Any, *, attention: AttentionSpec, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.attention = attention
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        /,
        *,
        packed_seq_params: VisitStreams,
        query_factor: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The queries are those of the streams that leave the visit, keys and values those of all; [s, b, heads * width].

        `query_factor`, if there is one, multiplies each channel of the rotated queries; [heads * width].
        """
        assert attention_mask is None, "visibility comes from the streams, not from a mask"
        visit = packed_seq_params
        query_angles, key_angles = visit.rotary_angles(self.attention)
        rotated_sbhd = self._rotate(query, query_angles)
        if query_factor is not None:
            rotated_sbhd = (rotated_sbhd * query_factor.view(rotated_sbhd.shape[2:])).to(query.dtype)
        q_BHND = _to_backend(rotated_sbhd)
        k_BGND, v_BGND = _to_backend(self._rotate(key, key_angles)), _to_backend(value)
        queries = dict(zip(visit.outputs, q_BHND.chunk(len(visit.outputs)), strict=True))
        streams = len(visit.streams)
        keys = dict(zip(visit.streams, zip(k_BGND.chunk(streams), v_BGND.chunk(streams), strict=True), strict=True))
        # Concatenated in Megatron's layout, which is that of FlexAttention's output in memory: one copy instead of two.
        found = [_from_backend(self._attend(visit, stream, queries[stream], keys)) for stream in visit.outputs]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _rotate(self, x_sbhd: torch.Tensor, angles_NB1D: torch.Tensor) -> torch.Tensor:
        factor = attention_factor(self.attention.rotary.scaling)
        return apply_rotary_pos_emb(x_sbhd, angles_NB1D, self.config, mscale=factor, cp_group=self.cp_group)

    def _attend(self, visit: VisitStreams, stream: Stream, q_BHND: torch.Tensor, keys: _Keys) -> torch.Tensor:
        window = self.attention.window
        if stream is Stream.REAL:
            return visit.backend.real(q_BHND, *keys[stream], window=window)
        return visit.backend.shadow(q_BHND, *keys[stream], *keys.get(Stream.REAL, (None, None)), window=window)
