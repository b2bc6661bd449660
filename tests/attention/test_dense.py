"""The dense backend against attention computed slot by slot. Level: float64 rounding."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_dmtd.attention import StreamLayout, make_backend, select_backend
from megatron_dmtd.errors import CapabilityError
from tests.oracles.visibility import may_read, walk
from tests.support.tiny import VARIANTS

ROWS, HEADS, GROUPS, WIDTH = 2, 4, 2, 8
CYCLE = 4


def _layout(documents: tuple[int, ...], variant: str) -> StreamLayout:
    block, history = variant.split("-")
    positions = torch.cat([torch.arange(length) for length in documents]).expand(ROWS, -1)
    ids = torch.cat([torch.full((length,), index) for index, length in enumerate(documents)]).expand(ROWS, -1)
    return StreamLayout(
        positions_BN=positions,
        documents_BN=ids,
        one_document_per_row=len(documents) == 1,
        cycle_length=CYCLE,
        history="real" if history == "refresh" else "shadow",
        block_attention=block,
    )


def _slot_by_slot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: list[list[bool]]) -> torch.Tensor:
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for slot, visible in enumerate(sees):
                keys = [index for index, sight in enumerate(visible) if sight]
                scores = k[row, group, keys] @ q[row, head, slot] / math.sqrt(WIDTH)
                out[row, head, slot] = scores.softmax(0) @ v[row, group, keys]
    return out


def _random(heads: int, slots: int, seed: int) -> torch.Tensor:
    return torch.randn(ROWS, heads, slots, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("documents", [(12,), (4, 8), (4, 4, 4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_streams_see_what_the_specification_says(variant: str, documents: tuple[int, ...]) -> None:
    slots = sum(documents)
    backend = make_backend("dense", _layout(documents, variant))
    q, k, v = _random(HEADS, slots, 0), _random(GROUPS, slots, 1), _random(GROUPS, slots, 2)
    real_k, real_v = _random(GROUPS, slots, 3), _random(GROUPS, slots, 4)
    real, shadow = walk("real", documents, CYCLE), walk("shadow", documents, CYCLE)

    refresh = variant.endswith("-refresh")
    causal = [[other.document == slot.document and other.position <= slot.position for other in real] for slot in real]
    torch.testing.assert_close(backend.real(q, k, v), _slot_by_slot(q, k, v, causal), atol=1e-12, rtol=0)

    keys = [*real, *shadow] if refresh else shadow
    sees = [[may_read(query, key, variant) for key in keys] for query in shadow]
    all_k = torch.cat((real_k, k), dim=2) if refresh else k
    all_v = torch.cat((real_v, v), dim=2) if refresh else v
    found = backend.shadow(q, k, v, real_k if refresh else None, real_v if refresh else None)
    torch.testing.assert_close(found, _slot_by_slot(q, all_k, all_v, sees), atol=1e-12, rtol=0)


def test_a_backend_that_is_not_built_is_refused_by_name() -> None:
    device = torch.device("cpu")
    assert select_backend("auto", device) == select_backend("dense", device) == "dense"
    with pytest.raises(CapabilityError, match="parallel.attention_backend = te on cpu"):
        select_backend("te", device)
