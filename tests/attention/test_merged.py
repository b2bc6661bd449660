"""Under a sliding window the work of one document's attention is linear in its length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.attention import merged
from megatron_dmtd.attention.dense import DenseAttention
from tests.attention.layouts import attend_shadow, layout_of, streams_of
from tests.support.tiny import VARIANTS

WINDOW = 100


def scored_pairs(monkeypatch: pytest.MonkeyPatch, variant: str, slots: int) -> tuple[int, int]:
    """Pairs of queries and keys that the kernels were given, forward and backward."""
    counts = [0, 0]

    def counting(kernel: Any, place: int, first: int) -> Any:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            query, key = arguments[first], arguments[first + 1]
            counts[place] += query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            return kernel(*arguments, **keywords)

        return counted

    with monkeypatch.context() as patched:
        patched.setattr(merged, "_forward", counting(merged._forward, 0, 0))
        patched.setattr(merged, "_backward", counting(merged._backward, 1, 1))
        streams = streams_of(1, slots, torch.float32, grad=True)
        backend = DenseAttention(layout_of(((slots,),), variant))
        (backend.real(*streams[:3], window=WINDOW).sum() + attend_shadow(backend, streams, variant, WINDOW).sum()).backward()
    return counts[0], counts[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_under_a_window_is_linear_in_the_length(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (scored_pairs(monkeypatch, variant, chunks * merged.CHUNK) for chunks in (4, 16))
    assert short[0] == short[1] > 4 * merged.CHUNK * WINDOW
    assert long[0] == long[1] <= 4.3 * short[0]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_queries_that_see_no_real_key_take_nothing_from_them(window: int) -> None:
    """Under a window of one cycle the last phase sees no earlier cycle, under one of one slot no phase does."""
    slots = 3 * merged.CHUNK
    q, k, v, real_k, real_v = streams_of(1, slots, grad=True)
    backend = DenseAttention(layout_of(((slots,),), "bidirectional-refresh"))
    phase = torch.arange(slots) % 4
    sees = (window > phase + 1) & (torch.arange(slots) >= 4)
    before = backend.shadow(q, k, v, real_k, real_v, window=window)
    after = backend.shadow(q, k, v, real_k + 1, real_v + 1, window=window)
    changed = (before != after).any(dim=-1)[0, 0]
    assert torch.equal(changed, sees)
    (gradient,) = torch.autograd.grad(after.sum(), real_v)
    assert torch.isfinite(gradient).all() and (gradient.abs().max() > 0) == bool(sees.any())
