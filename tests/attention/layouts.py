"""Layouts, streams and a slot-by-slot attention for the tests of the backends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_dmtd.attention import StreamLayout
from megatron_dmtd.cycle import ORDINARY, Method

HEADS, GROUPS, WIDTH = 4, 2, 8
CYCLE = 4
Documents = tuple[tuple[int, ...], ...]
#: rows whose documents have the same lengths, and rows that differ
ALIKE: list[Documents] = [((12,), (12,)), ((4, 8), (4, 8)), ((4, 4, 4), (4, 4, 4))]
UNLIKE: list[Documents] = [((12,), (4, 8))]


def method_of(variant: str, cycle_length: int = CYCLE) -> Method:
    """A method of this variant, whose parallel layers do not matter here."""
    return ORDINARY if variant == "vanilla" else Method(variant=variant, cycle_length=cycle_length, num_parallel_layers=1)


def layout_of(documents: Documents, variant: str, cycle_length: int = CYCLE, *, device: str = "cpu") -> StreamLayout:
    """The layout of rows that hold documents of these lengths."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    return StreamLayout(positions_BN=positions.to(device), document_lengths=documents, method=method_of(variant, cycle_length))


def streams_of(
    rows: int, slots: int, dtype: torch.dtype = torch.float64, *, grad: bool = False, width: int = WIDTH
) -> list[torch.Tensor]:
    """q, k, v, real_k, real_v."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS, GROUPS, GROUPS)
    return [torch.randn(rows, h, slots, width, generator=generator, dtype=dtype, requires_grad=grad) for h in heads]


def attend_shadow(backend: Any, streams: list[torch.Tensor], variant: str, window: int | None = None) -> torch.Tensor:
    """The shadow stream's attention, with real keys where the variant has them."""
    q, k, v, real_k, real_v = streams
    real = (real_k, real_v) if variant.endswith("-refresh") else (None, None)
    return backend.shadow(q, k, v, *real, window=window)


def slot_by_slot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: Sequence[Sequence[Sequence[bool]]]) -> torch.Tensor:
    """Attention of each query to the keys that it sees, by the definition."""
    out = torch.zeros_like(q)
    for row, row_sees in enumerate(sees):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for slot, visible in enumerate(row_sees):
                keys = [index for index, sight in enumerate(visible) if sight]
                scores = k[row, group, keys] @ q[row, head, slot] / math.sqrt(WIDTH)
                out[row, head, slot] = scores.softmax(0) @ v[row, group, keys]
    return out


def results_of(backend: Any, variant: str, slots: int, window: int | None = None) -> list[torch.Tensor | None]:
    """Both outputs, and the gradients of q, k, v, real_k and real_v under a fixed upstream gradient."""
    upstream = torch.randn(2, HEADS, slots, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    streams = streams_of(2, slots, grad=True)
    real, shadow = backend.real(*streams[:3], window=window), attend_shadow(backend, streams, variant, window)
    (real * upstream).sum().backward(retain_graph=True)
    (shadow * upstream).sum().backward()
    return [real, shadow, *(stream.grad for stream in streams)]
