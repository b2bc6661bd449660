"""Every backend gives the attention that docs/method.md defines, computed slot by slot.

Levels: float64 rounding for masked and dense; fp32 tolerance for FlexAttention, whose forward alone runs on a CPU.
"""

from __future__ import annotations

import pytest
import torch

from megatron_dmtd.attention import make_backend
from megatron_dmtd.attention.flex import FlexAttention
from megatron_dmtd.attention.masked import MaskedAttention
from tests.attention.layouts import (
    ALIKE,
    CYCLE,
    UNLIKE,
    Documents,
    attend_shadow,
    layout_of,
    slot_by_slot,
    streams_of,
)
from tests.oracles.visibility import may_read, walk
from tests.support.tiny import VARIANTS


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("documents", [*ALIKE, *UNLIKE])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["masked", "dense", "flex"])
def test_both_streams_see_what_the_specification_says(
    backend: str, variant: str, documents: Documents, window: int | None
) -> None:
    layout = layout_of(documents, variant)
    streams = streams_of(2, 12)
    q, k, v, real_k, real_v = streams
    attention = FlexAttention(layout, compiled=False) if backend == "flex" else make_backend(backend, layout)
    tolerance = 1e-6 if backend == "flex" else 1e-12

    real = [walk("real", row, CYCLE) for row in documents]
    shadow = [walk("shadow", row, CYCLE) for row in documents]
    causal = [[[may_read(query, key, variant, window) for key in row] for query in row] for row in real]
    torch.testing.assert_close(attention.real(q, k, v, window=window), slot_by_slot(q, k, v, causal), atol=tolerance, rtol=0)

    refresh = variant.endswith("-refresh")
    keys = [[*a, *b] if refresh else b for a, b in zip(real, shadow, strict=True)]
    sees = [
        [[may_read(query, key, variant, window) for key in row_keys] for query in row]
        for row, row_keys in zip(shadow, keys, strict=True)
    ]
    all_k = torch.cat((real_k, k), dim=2) if refresh else k
    all_v = torch.cat((real_v, v), dim=2) if refresh else v
    expected = slot_by_slot(q, all_k, all_v, sees)
    torch.testing.assert_close(attend_shadow(attention, streams, variant, window), expected, atol=tolerance, rtol=0)


def test_a_mask_is_made_once_for_each_window() -> None:
    attention = MaskedAttention(layout_of(((12,), (12,)), "causal-refresh"))
    made: list[int | None] = []
    make = attention.make_real_mask
    attention.make_real_mask = lambda window: (made.append(window), make(window))[1]  # type: ignore[method-assign]
    q, k, v, *_ = streams_of(2, 12)
    for window in (None, 3, None, 3, 5):
        attention.real(q, k, v, window=window)
    assert made == [None, 3, 5]


def test_a_real_stream_must_come_with_the_variants_that_have_one() -> None:
    q, k, v, *_ = streams_of(2, 12)
    for backend in ("masked", "dense"):
        with pytest.raises(AssertionError, match="this method has a real stream"):
            make_backend(backend, layout_of(((12,), (12,)), "causal-refresh")).shadow(q, k, v, None, None)
