"""Every backend gives the attention that docs/method.md defines, computed slot by slot.

Levels: float64 rounding for masked and dense, forward and backward; fp32 tolerance for FlexAttention, whose forward alone runs
on a CPU. The Transformer Engine backend runs on GPUs only: here its refusals are tested.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_dmtd.attention import StreamLayout, make_backend, select_backend
from megatron_dmtd.attention import flex as flex_backend
from megatron_dmtd.attention import te as te_backend
from megatron_dmtd.attention.dense import DenseAttention, segments
from megatron_dmtd.attention.flex import FlexAttention
from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.attention.merged import CHUNK, WINDOW
from megatron_dmtd.attention.select import FLEX_MIN_WIDTH
from megatron_dmtd.errors import CapabilityError
from tests.oracles.visibility import may_read, walk
from tests.support.tiny import VARIANTS

HEADS, GROUPS, WIDTH = 4, 2, 8
CYCLE = 4
ALIKE = [((12,), (12,)), ((4, 8), (4, 8)), ((4, 4, 4), (4, 4, 4))]
UNLIKE = [((12,), (4, 8))]
SEVERAL_CHUNKS = ((2 * CHUNK + 44, 20), (2 * CHUNK + 64,))
A_WINDOW_AND_A_CYCLE = ((WINDOW + CYCLE,), (WINDOW + CYCLE,))
ONE_CYCLE = ((CYCLE,), (CYCLE,))


def _layout(documents: tuple[tuple[int, ...], ...], variant: str, cycle_length: int = CYCLE) -> StreamLayout:
    block, history = variant.split("-")
    return StreamLayout(
        positions_BN=torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents]),
        document_lengths=documents,
        cycle_length=cycle_length,
        history="real" if history == "refresh" else "shadow",
        block_attention=block,
    )


def _slot_by_slot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: list[list[list[bool]]]) -> torch.Tensor:
    out = torch.zeros_like(q)
    for row, row_sees in enumerate(sees):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for slot, visible in enumerate(row_sees):
                keys = [index for index, sight in enumerate(visible) if sight]
                scores = k[row, group, keys] @ q[row, head, slot] / math.sqrt(WIDTH)
                out[row, head, slot] = scores.softmax(0) @ v[row, group, keys]
    return out


def _streams(
    rows: int, slots: int, dtype: torch.dtype = torch.float64, *, grad: bool = False, width: int = WIDTH
) -> list[torch.Tensor]:
    """q, k, v, real_k, real_v."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS, GROUPS, GROUPS)
    return [torch.randn(rows, h, slots, width, generator=generator, dtype=dtype, requires_grad=grad) for h in heads]


def _shadow(backend: Any, streams: list[torch.Tensor], variant: str) -> torch.Tensor:
    q, k, v, real_k, real_v = streams
    return backend.shadow(q, k, v, *((real_k, real_v) if variant.endswith("-refresh") else (None, None)))


@pytest.mark.parametrize("documents", [*ALIKE, *UNLIKE])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["masked", "dense", "flex"])
def test_both_streams_see_what_the_specification_says(backend: str, variant: str, documents: tuple[tuple[int, ...], ...]) -> None:
    layout = _layout(documents, variant)
    streams = _streams(2, 12)
    q, k, v, real_k, real_v = streams
    attention = FlexAttention(layout, compiled=False) if backend == "flex" else make_backend(backend, layout)
    tolerance = 1e-6 if backend == "flex" else 1e-12

    real = [walk("real", row, CYCLE) for row in documents]
    shadow = [walk("shadow", row, CYCLE) for row in documents]
    causal = [[[may_read(query, key, variant) for key in row] for query in row] for row in real]
    torch.testing.assert_close(attention.real(q, k, v), _slot_by_slot(q, k, v, causal), atol=tolerance, rtol=0)

    refresh = variant.endswith("-refresh")
    keys = [[*a, *b] if refresh else b for a, b in zip(real, shadow, strict=True)]
    sees = [
        [[may_read(query, key, variant) for key in row_keys] for query in row] for row, row_keys in zip(shadow, keys, strict=True)
    ]
    all_k = torch.cat((real_k, k), dim=2) if refresh else k
    all_v = torch.cat((real_v, v), dim=2) if refresh else v
    expected = _slot_by_slot(q, all_k, all_v, sees)
    torch.testing.assert_close(_shadow(attention, streams, variant), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("documents", [SEVERAL_CHUNKS, A_WINDOW_AND_A_CYCLE, ONE_CYCLE])
@pytest.mark.parametrize("cycle_length", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_equals_masked_forward_and_backward(
    variant: str, cycle_length: int, documents: tuple[tuple[int, ...], ...]
) -> None:
    layout = _layout(documents, variant, cycle_length)
    upstream = torch.randn(2, HEADS, sum(documents[0]), WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for backend in (MaskedAttention(layout), DenseAttention(layout)):
        streams = _streams(2, sum(documents[0]), grad=True)
        real, shadow = backend.real(*streams[:3]), _shadow(backend, streams, variant)
        (real * upstream).sum().backward(retain_graph=True)
        (shadow * upstream).sum().backward()
        results.append([real, shadow, *(stream.grad for stream in streams)])
    for masked, dense in zip(*results, strict=True):
        if masked is None:
            assert dense is None
            assert not variant.endswith("-refresh")
            continue
        torch.testing.assert_close(dense, masked, atol=1e-12, rtol=0)
    if documents != ONE_CYCLE:  # where no real key is ever read
        assert all(masked is None or masked.abs().max() > 0.01 for masked in results[0])


def test_segments_hold_whole_documents_and_join_short_ones() -> None:
    found = segments((8, 4, 400, 4, 120, 4, 4), most=128)
    assert [part.document_lengths for part in found] == [(8, 4), (400,), (4, 120, 4), (4,)]
    assert [(part.slots.start, part.slots.stop) for part in found] == [(0, 12), (12, 412), (412, 540), (540, 544)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_that_dense_keeps_for_the_backward_pass_grows_with_the_row_not_its_square(variant: str) -> None:
    kept = {}
    for slots in (512, 2048):
        numbers = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal numbers
            numbers += tensor.numel()
            return tensor

        streams = _streams(1, slots, torch.float32, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            backend = DenseAttention(_layout(((slots,),), variant))
            out = backend.real(*streams[:3]), _shadow(backend, streams, variant)
        assert all(part.requires_grad for part in out)
        kept[slots] = numbers
    assert kept[512] > 512 * WIDTH
    assert kept[2048] <= 4.1 * kept[512]


def test_a_layout_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(AssertionError):
        StreamLayout(
            positions_BN=torch.arange(8)[None], document_lengths=((4,),), cycle_length=4, history="real", block_attention="causal"
        )


def test_backends_are_chosen_by_device_and_refused_by_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    select = functools.partial(select_backend, head_width=16)
    assert (select("auto", cpu), select("auto", cuda)) == ("dense", "flex")
    assert select("masked", cpu) == select("masked", cuda) == "masked"
    with pytest.raises(CapabilityError, match="attention_backend = flex on cpu"):
        select("flex", cpu)
    with pytest.raises(CapabilityError, match="attention_backend = dense on cuda"):
        select("dense", cuda)
    with pytest.raises(CapabilityError, match="no package transformer_engine and no CUDA device"):
        select("te", cpu)


def test_flex_is_compiled_for_every_shape_and_never_evaluates_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")  # what is compiled for a GPU cannot be compiled here; when it is, can be seen
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex_backend, "_compiled", functools.cache(flex_backend._compiled.__wrapped__))
    shapes = range(4)
    # torch's own limit is 8, which a Refresh model reaches
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for slots in (CYCLE * (shape + 1) for shape in shapes):
            for documents in (((slots,),), ((CYCLE, slots - CYCLE) if slots > CYCLE else (slots,),)):
                attention = FlexAttention(_layout(documents, "bidirectional-refresh"))
                _shadow(attention, _streams(1, slots, torch.float32), "bidirectional-refresh")
    assert counter.frame_count == 2 * len(shapes)  # the mask and the attention; other documents change neither


@pytest.mark.parametrize("name", ["auto", "flex"])
def test_heads_too_narrow_for_the_kernels_of_a_gpu_are_refused(name: str) -> None:
    cuda = torch.device("cuda")
    with pytest.raises(CapabilityError, match="attention_backend = flex with heads of 8 numbers"):
        select_backend(name, cuda, head_width=8)
    assert select_backend("masked", cuda, head_width=8) == "masked"


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


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_flex_equals_masked_forward_and_backward_on_a_gpu(variant: str) -> None:
    documents = ((256, 512), (768,))
    layout = _layout(documents, variant)
    layout = StreamLayout(
        positions_BN=layout.positions_BN.cuda(),
        document_lengths=documents,
        cycle_length=CYCLE,
        history=layout.history,
        block_attention=layout.block_attention,
    )
    results = []
    for backend in (MaskedAttention(layout), FlexAttention(layout)):
        streams = [stream.cuda().requires_grad_() for stream in _streams(2, 768, torch.float32, width=FLEX_MIN_WIDTH)]
        out = [backend.real(*streams[:3]), _shadow(backend, streams, variant)]
        sum(part.square().sum() for part in out).backward()
        results.append([*out, *(stream.grad for stream in streams if stream.grad is not None)])
    for masked, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, masked, atol=2e-3, rtol=2e-3)
