"""Visibility in the form that attention kernels take: a dense boolean mask, or a FlexAttention `mask_mod`.

Both apply `rule.visible` to slots and add nothing to it. Import this module by its own name: `megatron_dmtd.cycle` does not
import torch.

Shape legend: B rows, N slots of a row and stream, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_dmtd.cycle.geometry import Slots
from megatron_dmtd.cycle.method import Method
from megatron_dmtd.cycle.rule import visible

#: FlexAttention's signature: (batch, head, query index, key index), all integer tensors, to a boolean tensor.
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def stream_slots(document: torch.Tensor, position: torch.Tensor, *, is_real: bool) -> Slots:
    """The slots of one stream from its `document` and `position` tensors, which have equal shapes, on their device."""
    assert document.shape == position.shape, (document.shape, position.shape)
    return Slots(torch.full_like(position, is_real, dtype=torch.bool), document, position)


def shadow_attention_slots(document: torch.Tensor, position: torch.Tensor, *, method: Method) -> tuple[Slots, Slots]:
    """`(queries, keys)` of the shadow stream's attention over rows of `[..., N]` slots.

    The queries are the N shadow slots. The keys are the slots of all streams of the method, one after the other: K is N or 2N.
    """
    streams = [stream_slots(document, position, is_real=stream == "real") for stream in method.streams]
    keys = streams[0] if len(streams) == 1 else Slots(*(torch.cat(parts, dim=-1) for parts in zip(*streams)))
    return streams[-1], keys


def dense_mask(query_slots: Slots, key_slots: Slots, *, method: Method, window: int | None = None) -> torch.Tensor:
    """Boolean mask `[..., Q, K]`, true where a query may read a key, from slots of shape `[..., Q]` and `[..., K]`.

    `window`: keys that a query sees at most, as `rule.visible` counts them; None: no limit. Quadratic in memory: for CPUs, tests
    and short rows. The fields of the slots are tensors or NumPy arrays.
    """
    query_is_real, query_document, query_position = (torch.as_tensor(part)[..., :, None] for part in query_slots)
    key_is_real, key_document, key_position = (torch.as_tensor(part)[..., None, :] for part in key_slots)
    return visible(
        query_is_real=query_is_real,
        query_document=query_document,
        query_position=query_position,
        key_is_real=key_is_real,
        key_document=key_document,
        key_position=key_position,
        cycle_length=method.cycle_length,
        history=method.history,
        block_attention=method.block_attention,
        window=window,
    )


def mask_mod(query_slots_BQ: Slots, key_slots_BK: Slots, *, method: Method, window: int | None = None) -> MaskMod:
    """The same mask as a function of indices, for `torch.nn.attention.flex_attention.create_block_mask`.

    The function captures the slots' tensors, so these must be on the device of the attention. Row b of the slots is batch index
    b; a single row serves a block mask made with B=None.
    """
    assert query_slots_BQ.position.dim() == key_slots_BK.position.dim() == 2, "one row of slots per batch entry"
    # Plain numbers and strings: the compiler takes these from the enclosing scope as constants.
    cycle_length, history, block_attention = method.cycle_length, method.history, method.block_attention

    def shadow_visibility(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return visible(
            query_is_real=query_slots_BQ.is_real[b, q_idx],
            query_document=query_slots_BQ.document[b, q_idx],
            query_position=query_slots_BQ.position[b, q_idx],
            key_is_real=key_slots_BK.is_real[b, kv_idx],
            key_document=key_slots_BK.document[b, kv_idx],
            key_position=key_slots_BK.position[b, kv_idx],
            cycle_length=cycle_length,
            history=history,
            block_attention=block_attention,
            window=window,
        )

    return shadow_visibility


def causal_document_mask_mod(document_BN: torch.Tensor, *, window: int | None = None) -> MaskMod:
    """Causal attention inside each document: the real branch, the sequential layers and vanilla models.

    It compares slot indices, not positions, since the slots of a document are consecutive in its row.
    """
    assert document_BN.dim() == 2, document_BN.shape

    def causal_in_document(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        seen = (document_BN[b, q_idx] == document_BN[b, kv_idx]) & (kv_idx <= q_idx)
        return seen if window is None else seen & (q_idx - kv_idx < window)

    return causal_in_document
