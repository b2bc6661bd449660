"""What may be reused, and what happens to entries when room runs out."""

import pytest
import torch

from megatron_dmtd.inference.planner import Method
from megatron_dmtd.inference.pools import KeyValuePool, Pools, PoolShape, Tables
from megatron_dmtd.inference.prefix import Known, PrefixIndex

TOKENS = list(range(100, 130))


def setting(variant: str, num_pages: int = 8) -> tuple[PrefixIndex, Pools, Method]:
    def pool(name: str, pages: int) -> KeyValuePool:
        shape = PoolShape(num_layers=1, num_pages=pages, num_key_value_heads=1, page_size=8, head_dim=2)
        return KeyValuePool(shape, name=name, dtype=torch.float32, device=torch.device("cpu"))

    method = Method(variant="vanilla") if variant == "vanilla" else Method(variant=variant, cycle_length=4, mask_token_id=9)
    pools = Pools(pool("P", 0 if variant == "vanilla" else num_pages), pool("S", num_pages))
    return PrefixIndex(pools, method), pools, method


def taken(pools: Pools, method: Method, count: int) -> Tables:
    tables = Tables.empty()
    pools.grow(tables, method.parallel_length(count), count)
    return tables


@pytest.mark.parametrize(
    ("variant", "pages"),
    [
        ("causal-norefresh", [0, 0, 1, 1, 1, 2]),
        ("bidirectional-norefresh", [0, 0, 1, 1, 1, 2]),
        ("causal-refresh", [0, 0, 0, 1, 1, 1]),
        ("bidirectional-refresh", [0, 0, 0, 1, 1, 1]),
        ("vanilla", [0, 0, 1, 1, 1, 2]),
    ],
)
def test_a_page_is_final_once_both_pools_have_all_of_it(variant, pages):
    """With 8 tokens taken, a refreshing model has refreshed the first cycle only; the second follows with the ninth token."""
    index, _, _ = setting(variant)
    assert [index.num_final_pages(count) for count in (1, 7, 8, 9, 15, 16)] == pages


def test_a_known_beginning_is_shared_and_counted_as_owned():
    index, pools, method = setting("causal-norefresh")
    tables = taken(pools, method, 20)
    assert index.add(TOKENS, tables, 20, Known()).num_pages == 2
    other, known = index.attach(TOKENS[:17])
    assert known.num_pages == 2
    assert other.parallel.pages == tables.parallel.pages[:2]
    assert other.sequential.pages == tables.sequential.pages[:2]
    pools.check_integrity([tables, other, *index.owned()])
    pools.release(tables)
    pools.check_integrity([other, *index.owned()])


def test_the_last_token_is_always_computed():
    index, pools, method = setting("causal-norefresh")
    index.add(TOKENS, taken(pools, method, 16), 16, Known())
    assert index.attach(TOKENS[:16])[1].num_pages == 1
    assert index.attach(TOKENS[:8])[1].num_pages == 0
    assert index.attach([*TOKENS[:8], 1, 2])[1].num_pages == 1
    assert index.attach([1, *TOKENS[1:20]])[1].num_pages == 0


def test_a_page_known_twice_keeps_its_first_copy():
    index, pools, method = setting("causal-norefresh")
    first, second = taken(pools, method, 8), taken(pools, method, 16)
    index.add(TOKENS, first, 8, Known())
    index.add(TOKENS, second, 16, Known())
    assert len(index) == 2
    tables, _ = index.attach(TOKENS)
    assert tables.sequential.pages == [first.sequential.pages[0], second.sequential.pages[1]]
    pools.check_integrity([first, second, tables, *index.owned()])


def test_the_least_recently_used_leaf_goes_first_and_pages_in_use_last():
    index, pools, method = setting("causal-norefresh")
    other_tokens = [1] * 8
    tables, other = taken(pools, method, 16), taken(pools, method, 8)
    known = index.add(TOKENS, tables, 16, Known())
    index.add(other_tokens, other, 8, Known())
    pools.release(tables)
    in_use = other
    assert index.evict_one() and len(index) == 2
    assert index.attach(TOKENS[:20])[1].num_pages == 1
    assert index.evict_one() and len(index) == 1
    assert index.attach([*other_tokens, 1])[1].num_pages == 1 or len(index) == 1
    assert index.evict_one() and not index.evict_one()
    assert known.num_pages == 2
    assert pools.sequential.pages.num_owners(in_use.sequential.pages[0]) >= 1


def test_a_forgotten_beginning_is_entered_again_from_the_start():
    index, pools, method = setting("causal-norefresh")
    tables = taken(pools, method, 24)
    known = index.add(TOKENS, tables, 16, Known())
    while index.evict_one():
        pass
    assert len(index) == 0
    assert index.add(TOKENS, tables, 24, known).num_pages == 3
    assert len(index) == 3
    index.clear()
    pools.check_integrity([tables])


def test_pages_that_split_cycles_are_no_setting():
    with pytest.raises(AssertionError, match="whole cycles"):
        PrefixIndex(setting("causal-refresh")[1], Method(variant="causal-refresh", cycle_length=3, mask_token_id=9))
