import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.inference.kv.pages import PagePool, PageTable


def pool(num_pages: int = 4) -> PagePool:
    return PagePool(num_pages=num_pages, page_size=16, name="S")


def test_a_table_grows_by_whole_pages_only_when_it_must():
    pages, table = pool(), PageTable()
    pages.grow(table, 16)
    assert table.pages == [0]
    pages.grow(table, 16)
    assert table.pages == [0]
    pages.grow(table, 17)
    assert table.pages == [0, 1]
    assert pages.num_free == 2
    pages.check_integrity([table.pages])


def test_a_shared_page_is_free_only_after_its_last_owner_lets_go():
    pages, table = pool(), PageTable()
    pages.grow(table, 32)
    other = list(table.pages)
    pages.share(other)
    pages.release_table(table)
    assert pages.num_free == 2 and pages.num_owners(other[0]) == 1
    pages.check_integrity([other])
    pages.release(other)
    assert pages.num_free == 4
    pages.check_integrity([])


def test_misuse_is_found_at_once():
    pages, table = pool(), PageTable()
    pages.grow(table, 16)
    with pytest.raises(AssertionError, match="S: 4 pages asked for, 3 free"):
        pages.grow(PageTable(), 64)
    with pytest.raises(AssertionError, match="page 3 is free and cannot be shared"):
        pages.share([3])
    with pytest.raises(AssertionError, match="page 3 freed twice"):
        pages.release([3])


def test_integrity_names_lost_invented_and_doubly_free_pages():
    pages, table = pool(), PageTable()
    pages.grow(table, 16)
    with pytest.raises(AssertionError, match="page 0 counts 1 owners, 0 name it"):
        pages.check_integrity([])
    with pytest.raises(AssertionError, match=r"owned pages \[7\] do not exist"):
        pages.check_integrity([table.pages, [7]])
    pages._free.append(3)
    with pytest.raises(AssertionError, match="page 3 is 2 times free"):
        pages.check_integrity([table.pages])


def test_a_free_page_with_an_owner_is_never_handed_out():
    pages = pool(1)
    pages._owners[0] = 1
    with pytest.raises(AssertionError, match="page 0 was free and has 1 owners"):
        pages.grow(PageTable(), 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["grow", "share", "release"]), st.integers(0, 5), st.integers(0, 90)), max_size=40))
def test_no_sequence_of_requests_breaks_the_law(operations):
    pages, tables = pool(6), [PageTable() for _ in range(6)]
    for name, index, amount in operations:
        table = tables[index]
        if name == "grow" and pages.missing(table, amount) <= pages.num_free:
            pages.grow(table, amount)
        elif name == "share" and not table.pages:
            donor = tables[amount % len(tables)]
            pages.share(donor.pages)
            table.pages = list(donor.pages)
        elif name == "release":
            pages.release_table(table)
        pages.check_integrity([table.pages for table in tables])
