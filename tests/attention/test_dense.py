"""The dense backend equals the masked one, forward and backward, to float64 rounding, in memory linear in the row's length."""

from __future__ import annotations

import pytest
import torch

from megatron_dmtd.attention.dense import DenseAttention, segments
from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.attention.merged import BLOCK, CHUNK
from tests.attention.layouts import CYCLE, WIDTH, Documents, attend_shadow, layout_of, results_of, streams_of
from tests.support.tiny import VARIANTS

SEVERAL_CHUNKS = ((2 * CHUNK + 44, 20), (2 * CHUNK + 64,))
A_BLOCK_AND_A_CYCLE = ((BLOCK + CYCLE,), (BLOCK + CYCLE,))
ONE_CYCLE = ((CYCLE,), (CYCLE,))


def assert_dense_equals_masked(variant: str, cycle_length: int, documents: Documents, window: int | None) -> None:
    layout, slots = layout_of(documents, variant, cycle_length), sum(documents[0])
    masked, dense = (results_of(backend, variant, slots, window) for backend in (MaskedAttention(layout), DenseAttention(layout)))
    for expected, found in zip(masked, dense, strict=True):
        if expected is None:
            assert found is None
            assert not variant.endswith("-refresh")
            continue
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    # Where each query sees itself alone, nothing depends on queries and keys; in one cycle no real key is ever read.
    if documents != ONE_CYCLE and window not in (1, 2):
        assert all(expected is None or expected.abs().max() > 0.01 for expected in masked)


@pytest.mark.parametrize("documents", [SEVERAL_CHUNKS, A_BLOCK_AND_A_CYCLE, ONE_CYCLE])
@pytest.mark.parametrize("cycle_length", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_equals_masked_forward_and_backward(variant: str, cycle_length: int, documents: Documents) -> None:
    assert_dense_equals_masked(variant, cycle_length, documents, None)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 60, CHUNK, CHUNK + 3, 2 * CHUNK, 2 * CHUNK + 50, 10 * CHUNK])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_equals_masked_under_a_sliding_window(variant: str, window: int) -> None:
    """Windows inside a cycle, of a cycle, of a chunk and around it, and longer than any document."""
    assert_dense_equals_masked(variant, CYCLE, SEVERAL_CHUNKS, window)
    assert_dense_equals_masked(variant, CYCLE, A_BLOCK_AND_A_CYCLE, window)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_hides_something_unless_it_is_longer_than_the_document(variant: str) -> None:
    slots = 2 * CHUNK
    backend, streams = DenseAttention(layout_of(((slots,),), variant)), streams_of(1, slots)
    whole = backend.real(*streams[:3]), attend_shadow(backend, streams, variant)
    longer = backend.real(*streams[:3], window=slots), attend_shadow(backend, streams, variant, slots)
    assert all(torch.equal(a, b) for a, b in zip(whole, longer, strict=True))
    shorter = backend.real(*streams[:3], window=slots - 1), attend_shadow(backend, streams, variant, slots - CYCLE)
    for a, b in zip(whole, shorter, strict=True):
        assert torch.equal(a[:, :, : CHUNK - CYCLE], b[:, :, : CHUNK - CYCLE])
        assert not torch.equal(a[:, :, -1], b[:, :, -1])


def test_segments_hold_whole_documents_and_join_short_ones() -> None:
    found = segments((8, 4, 400, 4, 120, 4, 4), most=128)
    assert [part.document_lengths for part in found] == [(8, 4), (400,), (4, 120, 4), (4,)]
    assert [(part.slots.start, part.slots.stop) for part in found] == [(0, 12), (12, 412), (412, 540), (540, 544)]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_that_dense_keeps_for_the_backward_pass_grows_with_the_row_not_its_square(
    variant: str, window: int | None
) -> None:
    kept = {}
    for slots in (512, 2048):
        numbers = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal numbers
            numbers += tensor.numel()
            return tensor

        streams = streams_of(1, slots, torch.float32, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            backend = DenseAttention(layout_of(((slots,),), variant))
            out = backend.real(*streams[:3], window=window), attend_shadow(backend, streams, variant, window)
        assert all(part.requires_grad for part in out)
        kept[slots] = numbers
    assert kept[512] > 512 * WIDTH
    assert kept[2048] <= 4.1 * kept[512]
