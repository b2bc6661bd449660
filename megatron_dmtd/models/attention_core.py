"""The attention core of a layer: from Megatron's [s, b, heads, width] to a backend's streams and back.

Shape legend: B rows, N slots, H query heads, G key-value heads, D head width; a Megatron b of 2B is [real rows | shadow rows].
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from megatron_dmtd.models.streams import Streams

#: what a layer's stream is: `sequential` also names every layer of a vanilla model
LAYER_KINDS = ("parallel", "last_parallel", "sequential")


def _to_backend(x_sbhd: torch.Tensor) -> torch.Tensor:
    return x_sbhd.permute(1, 2, 0, 3)


def _from_backend(x_BHND: torch.Tensor) -> torch.Tensor:
    b, h, n, d = x_BHND.shape
    return x_BHND.permute(2, 0, 1, 3).reshape(n, b, h * d)


class StreamAttentionCore(MegatronModule):
    """Stands where Megatron's DotProductAttention stands; the kind of layer says which streams it holds."""

    def __init__(self, config: Any, *, layer_kind: str, **_: Any) -> None:
        super().__init__(config=config)
        assert layer_kind in LAYER_KINDS, layer_kind
        self.layer_kind = layer_kind

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        /,
        *,
        packed_seq_params: Streams,
        **_: Any,
    ) -> torch.Tensor:
        """Attend; [s, b, heads * width]."""
        assert attention_mask is None, "visibility comes from the streams, not from a mask"
        q, k, v = _to_backend(query), _to_backend(key), _to_backend(value)
        backend = packed_seq_params.backend
        if self.layer_kind == "sequential":
            return _from_backend(backend.real(q, k, v))
        if packed_seq_params.num_streams == 1:
            return _from_backend(backend.shadow(q, k, v, None, None))
        rows = k.shape[0] // 2
        real_k, real_v = k[:rows], v[:rows]
        if self.layer_kind == "last_parallel":
            return _from_backend(backend.shadow(q, k[rows:], v[rows:], real_k, real_v))
        real = backend.real(q[:rows], real_k, real_v)
        shadow = backend.shadow(q[rows:], k[rows:], v[rows:], real_k, real_v)
        # Joined in Megatron's form, which is how FlexAttention's output lies in memory: one copy, and not two.
        return torch.cat((_from_backend(real), _from_backend(shadow)), dim=1)
