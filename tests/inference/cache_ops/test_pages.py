"""Page sets: one page of every group, with counted owners."""

import torch

from megatron_dmtd.architecture import make_schedule
from megatron_dmtd.inference.cache_ops.pages import CountedPages, StorePages
from megatron_dmtd.inference.kv.codec import PlainCodec
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore
from tests.inference.oracle_models import decoder_of, method_of
from tests.oracles.parallel_dmtd import Shape


def store_of(num_pages: int, page_size: int = 4) -> KVStore:
    shape = Shape(num_layers=2, num_parallel_layers=1)
    schedule = make_schedule(decoder_of(shape), method_of(shape, "real", "causal"))
    return KVStore(schedule, PlainCodec(torch.float32), num_pages=num_pages, page_size=page_size)


def test_a_page_set_is_one_page_of_every_group_and_is_freed_by_its_last_owner():
    store = store_of(3)
    pages = StorePages(store)
    one = pages.new()
    assert set(one.tables) == set(store.groups) == {"parallel", "sequential"} and pages.num_free == 2
    assert pages.is_sole_owner(one)
    pages.share(one)
    assert not pages.is_sole_owner(one)
    store.check_integrity([one.tables, one.tables])
    pages.release(one)
    pages.release(one)
    assert pages.num_free == 3
    store.check_integrity([PageTables()])


def test_counted_pages_remember_the_most():
    pages = CountedPages(4)
    first = pages.new()
    pages.new()
    pages.release(first)
    pages.new()
    assert (pages.num_used, pages.most_used) == (2, 2)
