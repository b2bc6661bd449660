"""What may be reused, and what happens to entries when room runs out."""

import random

import pytest

from megatron_dmtd.inference.kv.prefix import Known, PrefixIndex
from megatron_dmtd.inference.kv.store import KVStore
from tests.inference.kv.stores import mixed_store, small_store, taken

TOKENS = list(range(100, 130))


def setting(variant: str, num_pages: int = 8) -> tuple[PrefixIndex, KVStore]:
    store = small_store(variant, num_pages=num_pages)
    return PrefixIndex(store), store


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
def test_a_page_is_final_once_every_group_has_all_of_it(variant, pages):
    """With 8 tokens taken, a refreshing model has refreshed the first cycle only; the second follows with the ninth token."""
    index, _ = setting(variant)
    assert [index.num_final_pages(count) for count in (1, 7, 8, 9, 15, 16)] == pages


def test_a_known_beginning_is_shared_and_counted_as_owned():
    index, store = setting("causal-norefresh")
    tables = taken(store, 20)
    assert index.add(TOKENS, tables, 20, Known()).num_pages == 2
    other, known = index.attach(TOKENS[:17])
    assert known.num_pages == 2
    assert other["parallel"].pages == tables["parallel"].pages[:2]
    assert other["sequential"].pages == tables["sequential"].pages[:2]
    store.check_integrity([tables, other, *index.owned()])
    store.release(tables)
    store.check_integrity([other, *index.owned()])


def test_the_last_token_is_always_computed():
    index, store = setting("causal-norefresh")
    index.add(TOKENS, taken(store, 16), 16, Known())
    assert index.attach(TOKENS[:16])[1].num_pages == 1
    assert index.attach(TOKENS[:8])[1].num_pages == 0
    assert index.attach([*TOKENS[:8], 1, 2])[1].num_pages == 1
    assert index.attach([1, *TOKENS[1:20]])[1].num_pages == 0


def test_a_page_known_twice_keeps_its_first_copy():
    index, store = setting("causal-norefresh")
    first, second = taken(store, 8), taken(store, 16)
    index.add(TOKENS, first, 8, Known())
    index.add(TOKENS, second, 16, Known())
    assert len(index) == 2
    tables, _ = index.attach(TOKENS)
    assert tables["sequential"].pages == [first["sequential"].pages[0], second["sequential"].pages[1]]
    store.check_integrity([first, second, tables, *index.owned()])


def test_the_least_recently_used_leaf_goes_first_and_pages_in_use_last():
    index, store = setting("causal-norefresh")
    other_tokens = [1] * 8
    tables, other = taken(store, 16), taken(store, 8)
    known = index.add(TOKENS, tables, 16, Known())
    index.add(other_tokens, other, 8, Known())
    store.release(tables)
    in_use = other
    assert index.evict_one() and len(index) == 2
    assert index.attach(TOKENS[:20])[1].num_pages == 1
    assert index.evict_one() and len(index) == 1
    assert index.attach([*other_tokens, 1])[1].num_pages == 1 or len(index) == 1
    assert index.evict_one() and not index.evict_one()
    assert known.num_pages == 2
    assert store.groups["sequential"].pages.num_owners(in_use["sequential"].pages[0]) >= 1


def test_a_beginning_used_alone_outlives_what_followed_it():
    index, store = setting("causal-norefresh")
    for tail in (0, 1):
        tables = taken(store, 16)
        index.add(TOKENS[:8] + [tail] * 8, tables, 16, Known())
        store.release(tables)
    other = taken(store, 8)
    index.add([7] * 8, other, 8, Known())
    store.release(other)
    shared, known = index.attach([*TOKENS[:8], 5])
    assert known.num_pages == 1
    store.release(shared)
    assert all(index.evict_one() for _ in range(3))
    assert index.attach([*TOKENS[:8], 5])[1].num_pages == 1 and len(index) == 1


class ObviousIndex:
    """Paths of pages with their last use and whether a request holds them; looks at all of them for every eviction."""

    def __init__(self) -> None:
        self.last_use: dict[tuple, int] = {}
        self.clock = 0

    def use(self, pages: list[tuple], *, add: bool) -> int:
        for count in range(1, len(pages) + 1):
            path = tuple(pages[:count])
            if not add and path not in self.last_use:
                return count - 1
            self.clock += 1
            self.last_use[path] = self.clock
        return len(pages)

    def evict(self, held: set[tuple]) -> None:
        parents = {path[:-1] for path in self.last_use}
        leaves = [path for path in self.last_use if path not in parents]
        free = [path for path in leaves if path not in held] or leaves
        del self.last_use[min(free, key=self.last_use.__getitem__)]


def test_random_uses_and_evictions_keep_what_an_obvious_index_keeps():
    index, store = setting("causal-norefresh", num_pages=400)
    generator, obvious, held = random.Random(5), ObviousIndex(), []
    for _ in range(600):
        pages = [(generator.randrange(3),) * 8 for _ in range(generator.randint(1, 4))]
        tokens = [token for page in pages for token in page]
        action = generator.random()
        if action < 0.5:
            tables = taken(store, len(tokens))
            index.add(tokens, tables, len(tokens), Known())
            obvious.use(pages, add=True)
            store.release(tables)
        elif action < 0.8:
            tables, known = index.attach([*tokens, 1])
            assert known.num_pages == obvious.use(pages, add=False)
            held.append((tables, {tuple(pages[: count + 1]) for count in range(known.num_pages)}))
            if len(held) > 3:
                store.release(held.pop(0)[0])
        elif len(index):
            assert index.evict_one()
            obvious.evict(set().union(*(paths for _, paths in held)))
        assert len(index) == len(obvious.last_use)
        store.check_integrity([*(tables for tables, _ in held), *index.owned()])
    assert len(index) > 5


def test_the_work_of_an_eviction_does_not_grow_with_the_number_of_entries(monkeypatch):
    looked_at, pop_leaf = [], PrefixIndex._pop_leaf
    monkeypatch.setattr(PrefixIndex, "_pop_leaf", lambda index: looked_at.append(1) or pop_leaf(index))
    counts = {}
    for num_entries in (50, 1000):
        index, store = setting("causal-norefresh", num_pages=num_entries)
        for first in range(num_entries):
            tables = taken(store, 8)
            index.add([first] * 8, tables, 8, Known())
            store.release(tables)
        held = [index.attach([first] * 9)[0] for first in range(4)]
        looked_at.clear()
        assert all(index.evict_one() for _ in range(20))
        counts[num_entries] = len(looked_at)
        store.check_integrity([*held, *index.owned()])
    assert counts[1000] == counts[50] <= 20 * 5


def test_a_forgotten_beginning_is_entered_again_from_the_start():
    index, store = setting("causal-norefresh")
    tables = taken(store, 24)
    known = index.add(TOKENS, tables, 16, Known())
    while index.evict_one():
        pass
    assert len(index) == 0
    assert index.add(TOKENS, tables, 24, known).num_pages == 3
    assert len(index) == 3
    index.clear()
    store.check_integrity([tables])


def test_pages_that_split_cycles_are_no_setting():
    with pytest.raises(AssertionError, match="whole cycles"):
        PrefixIndex(small_store("causal-refresh", cycle_length=3))


def test_a_prefix_has_its_page_of_every_group_of_a_mixed_model():
    store = mixed_store("bidirectional-norefresh")
    index = PrefixIndex(store)
    tables = taken(store, 20)
    index.add(TOKENS, tables, 20, Known())
    other, known = index.attach(TOKENS[:18])
    assert known.num_pages == 2 and len(store.groups) == 4
    assert all(other[name].pages == tables[name].pages[:2] for name in store.groups)
    store.check_integrity([tables, other, *index.owned()])
    store.release(tables)
    store.release(other)
    assert all(index.evict_one() for _ in range(2))
    assert all(group.pages.num_free == 8 for group in store.groups.values())
