import pytest
import torch

from megatron_dmtd.architecture import make_schedule
from megatron_dmtd.inference.kv.codec import PlainCodec
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore, page_bytes
from tests.architecture.decoders import windowed
from tests.inference.kv.stores import method_of, mixed_store, small_store, taken


def test_there_is_a_group_for_each_of_the_schedules_and_a_place_for_each_of_its_visits():
    assert {name: len(store.places) for name, store in small_store().groups.items()} == {"parallel": 2, "sequential": 2}
    assert {name: len(store.places) for name, store in small_store("vanilla").groups.items()} == {"sequential": 4}
    assert {name: len(store.places) for name, store in mixed_store().groups.items()} == {
        "parallel/window-6/2x8": 1,
        "parallel/full/2x8": 1,
        "sequential/window-6/2x8": 1,
        "sequential/full/2x8": 1,
    }


def test_a_page_weighs_k_and_v_of_all_visits():
    schedule = make_schedule(windowed(window=6, pattern=(True, False, True, False)), method_of("causal-refresh"))
    # K and V, 4 layers, 2 heads of 8, 16 entries
    assert page_bytes(schedule, PlainCodec(torch.float32), page_size=16) == 2 * 4 * 2 * 8 * 16 * 4
    assert page_bytes(schedule, PlainCodec(torch.bfloat16), page_size=16) == 2 * 4 * 2 * 8 * 16 * 2


def test_scratch_pages_are_memory_that_nobody_can_own():
    schedule = make_schedule(windowed(window=6, pattern=(True,) * 4), method_of("causal-refresh"))
    store = KVStore(schedule, PlainCodec(torch.float32), num_pages=5, page_size=8, num_scratch_pages=3)
    for group in store.groups.values():
        assert group.pages.num_pages == group.pages.num_free == 5
        assert all(place.v_PGTD.shape == (8, 2, 8, 8) for place in group.places)


def test_missing_pages_are_counted_in_each_group_by_its_own_law():
    store, tables = small_store(page_size=4, num_pages=4), PageTables()
    assert store.num_entries(9) == {"parallel": 8, "sequential": 9}
    assert store.missing(tables, 9) == {"parallel": 2, "sequential": 3}
    store.grow(tables, 5)
    assert {name: len(table.pages) for name, table in tables.items()} == {"parallel": 1, "sequential": 2}
    assert store.missing(tables, 9) == {"parallel": 1, "sequential": 1}
    assert store.has_free({"parallel": 3, "sequential": 2})
    assert not store.has_free({"parallel": 4, "sequential": 2})
    assert not store.has_free({"parallel": 3, "sequential": 3})
    store.check_integrity([tables])


def test_groups_of_one_pass_grow_alike():
    store = mixed_store(page_size=4)
    tables = taken(store, 9)
    assert [len(tables[name].pages) for name in store.groups] == [2, 2, 3, 3]
    assert store.missing(tables, 13) == dict(zip(store.groups, [1, 1, 1, 1]))


def test_release_returns_the_pages_of_every_group():
    store = mixed_store()
    tables = taken(store, 20)
    assert all(group.pages.num_free < 8 for group in store.groups.values())
    store.release(tables)
    assert all(group.pages.num_free == 8 for group in store.groups.values())
    store.check_integrity([tables])


def test_shared_pages_have_another_owner_in_every_group():
    store = mixed_store()
    tables = taken(store, 20)
    assert store.is_sole_owner(tables)
    store.share(tables)
    assert not store.is_sole_owner(tables)
    store.check_integrity([tables, tables])


@pytest.mark.parametrize("name", ["parallel", "sequential"])
def test_the_check_sees_a_page_lost_in_any_group(name):
    store = small_store(page_size=4)
    tables = taken(store, 9)
    tables[name].pages.pop(0)
    with pytest.raises(AssertionError, match=f"{name}: page 0"):
        store.check_integrity([tables])
