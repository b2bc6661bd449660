"""Small K/V stores, and how much a request has in them."""

from __future__ import annotations

import torch

from megatron_dmtd.architecture import DecoderSpec, make_schedule
from megatron_dmtd.cycle import ORDINARY, VANILLA, Method
from megatron_dmtd.inference.kv.codec import PlainCodec
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore
from tests.architecture.decoders import decoder, windowed

#: Sizes of the layers in `tests.architecture.decoders`.
NUM_HEADS, HEAD_DIM = 2, 8


def method_of(variant: str, cycle_length: int = 4) -> Method:
    """Two parallel layers, or none."""
    if variant == VANILLA:
        return ORDINARY
    return Method(variant=variant, cycle_length=cycle_length, mask_token_id=9, num_parallel_layers=2)


def small_store(
    variant: str = "causal-refresh",
    *,
    num_pages: int = 8,
    page_size: int = 8,
    cycle_length: int = 4,
    spec: DecoderSpec | None = None,
) -> KVStore:
    """A store for four layers, two of them parallel but in a vanilla model."""
    schedule = make_schedule(spec or decoder(), method_of(variant, cycle_length))
    return KVStore(schedule, PlainCodec(torch.float32), num_pages=num_pages, page_size=page_size)


def mixed_store(variant: str = "causal-refresh", *, num_pages: int = 8, page_size: int = 8) -> KVStore:
    """The same with a window of 6 in the first and third layer: two groups per pass."""
    spec = windowed(window=6, pattern=(True, False, True, False))
    return small_store(variant, num_pages=num_pages, page_size=page_size, spec=spec)


def taken(store: KVStore, num_tokens: int) -> PageTables:
    """The pages of a request that has taken so many tokens."""
    tables = PageTables()
    store.grow(tables, num_tokens)
    return tables
