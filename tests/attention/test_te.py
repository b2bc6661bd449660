"""What of the Transformer Engine backend runs without a GPU: its refusals, and what it hands to TE."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_dmtd.attention import te as te_backend
from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.errors import CapabilityError
from tests.attention.layouts import HEADS, attend_shadow, layout_of, streams_of
from tests.support.tiny import VARIANTS


class DotProductAttention:
    """TE's attention as this project calls it, by its documentation: [b, s, h, d], true in a mask means hidden."""

    def __init__(self, *, num_attention_heads: int, num_gqa_groups: int, qkv_format: str, **_: Any) -> None:
        assert (num_attention_heads, qkv_format) == (HEADS, "bshd")
        self.repeats = num_attention_heads // num_gqa_groups

    def __call__(self, q: Any, k: Any, v: Any, *, attention_mask: torch.Tensor, attn_mask_type: str) -> torch.Tensor:
        assert attn_mask_type == "arbitrary"
        k, v = (x.repeat_interleave(self.repeats, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(attention_mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformer_engine_is_given_the_masks_of_the_masked_backend(
    variant: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("transformer_engine.pytorch")
    library.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library)
    monkeypatch.setattr(te_backend, "free_bytes", lambda _: 2**30)
    layout, streams = layout_of(((4, 12), (8, 8)), variant), streams_of(2, 16)
    ours, te = MaskedAttention(layout), te_backend.TransformerEngineAttention(layout)
    for found, expected in (
        (te.real(*streams[:3], window=window), ours.real(*streams[:3], window=window)),
        (attend_shadow(te, streams, variant, window), attend_shadow(ours, streams, variant, window)),
    ):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_transformer_engine_refuses_rows_whose_scores_do_not_fit() -> None:
    needed = te_backend.score_bytes(rows=1, heads=32, slots=4096, keys=8192, bytes_per_score=2)
    assert needed == 4096 * 8192 * 129
    te_backend.require_memory(needed, needed, slots=4096)
    with pytest.raises(CapabilityError, match=r"rows of 4096 slots, whose scores take 4.0 GiB per layer; 1.0 GiB are free"):
        te_backend.require_memory(needed, 2**30, slots=4096)


def test_memory_that_torch_holds_and_nobody_uses_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"mem_get_info": (2 * 2**30, 80 * 2**30), "memory_reserved": 70 * 2**30, "memory_allocated": 30 * 2**30}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    assert te_backend.free_bytes(torch.device("cuda")) == 42 * 2**30
