"""FlexAttention: compilations, and its numbers on a GPU. Its masks are tested in `test_joined` and `tests/cycle/test_mask.py`."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_dmtd.attention import flex as flex_backend
from megatron_dmtd.attention.flex import FlexAttention
from megatron_dmtd.attention.masked import MaskedAttention
from megatron_dmtd.attention.select import FLEX_MIN_HEAD_DIM
from tests.attention.layouts import CYCLE, attend_shadow, layout_of, streams_of
from tests.support.tiny import VARIANTS


def test_flex_is_compiled_for_every_shape_and_never_evaluates_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")  # what is compiled for a GPU cannot be compiled here; when it is, can be seen
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex_backend, "_compiled", functools.cache(flex_backend._compiled.__wrapped__))
    shapes = range(4)
    # torch's own limit is 8, which a Refresh model reaches
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for slots in (CYCLE * (shape + 1) for shape in shapes):
            for documents in (((slots,),), ((CYCLE, slots - CYCLE) if slots > CYCLE else (slots,),)):
                attention = FlexAttention(layout_of(documents, "bidirectional-refresh"))
                attend_shadow(attention, streams_of(1, slots, torch.float32), "bidirectional-refresh")
    assert counter.frame_count == 2 * len(shapes)  # the mask and the attention; other documents change neither


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_flex_equals_masked_forward_and_backward_on_a_gpu(variant: str, window: int | None) -> None:
    layout = layout_of(((256, 512), (768,)), variant, device="cuda")
    results = []
    for backend in (MaskedAttention(layout), FlexAttention(layout)):
        streams = [stream.cuda().requires_grad_() for stream in streams_of(2, 768, torch.float32, width=FLEX_MIN_HEAD_DIM)]
        out = [backend.real(*streams[:3], window=window), attend_shadow(backend, streams, variant, window)]
        sum(part.square().sum() for part in out).backward()
        results.append([*out, *(stream.grad for stream in streams if stream.grad is not None)])
    for masked, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, masked, atol=2e-3, rtol=2e-3)
