from __future__ import annotations

import pytest
import torch

from megatron_dmtd.attention import StreamLayout
from tests.attention.layouts import layout_of, method_of


def test_a_layout_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(AssertionError):
        StreamLayout(positions_BN=torch.arange(8)[None], document_lengths=((4,),), method=method_of("vanilla"))


def test_the_documents_of_a_layout_are_counted_row_by_row() -> None:
    layout = layout_of(((4, 8), (8, 4)), "causal-refresh")
    assert layout.documents_BN.tolist() == [[0] * 4 + [1] * 8, [0] * 8 + [1] * 4]
    assert not layout.rows_are_alike


def test_a_part_of_a_layout_keeps_positions_and_method() -> None:
    layout = layout_of(((4, 8), (8, 4)), "causal-refresh")
    part = layout.part(slice(0, 1), slice(4, 12), (8,))
    assert part.positions_BN.tolist() == [list(range(8))]
    assert (part.document_lengths, part.method) == (((8,),), layout.method)
