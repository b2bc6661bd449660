"""Pages of all K/V groups in step: a page set is one page of every group, with the same offsets. Numbers only.

A token's K and V are at one offset of one page set, in every group. Tokens of one cycle are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore


class PageSet:
    """One page of every group. It is freed when its last owner lets go."""

    __slots__ = ("tables",)

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables


class PageSource(Protocol):
    """Who gives page sets."""

    page_size: int

    def new(self) -> PageSet:
        """A page set with one owner."""

    def share(self, pages: PageSet) -> None:
        """One more owner."""

    def release(self, pages: PageSet) -> None:
        """One owner less."""


class StorePages:
    """Page sets of a store."""

    def __init__(self, store: KVStore) -> None:
        self.store, self.page_size = store, store.page_size

    @property
    def num_free(self) -> int:
        """Page sets that can be had without evicting anything."""
        return min(group.pages.num_free for group in self.store.groups.values())

    def new(self) -> PageSet:
        """See `PageSource`."""
        tables = PageTables()
        for name, group in self.store.groups.items():
            group.pages.grow(tables[name], self.page_size)
        return PageSet(tables)

    def share(self, pages: PageSet) -> None:
        """See `PageSource`."""
        self.store.share(pages.tables)

    def release(self, pages: PageSet) -> None:
        """See `PageSource`."""
        for name, group in self.store.groups.items():
            group.pages.release(pages.tables[name].pages)

    def is_sole_owner(self, pages: PageSet) -> bool:
        """Whether it has one owner."""
        return self.store.is_sole_owner(pages.tables)


class CountedPages:
    """Page sets of no store, to find out how many a request needs at most."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_used = self.most_used = 0

    def new(self) -> PageSet:
        """See `PageSource`."""
        self.num_used += 1
        self.most_used = max(self.most_used, self.num_used)
        return PageSet(PageTables())

    def share(self, pages: PageSet) -> None:
        """See `PageSource`. Nobody shares these."""
        raise AssertionError(pages)

    def release(self, pages: PageSet) -> None:
        """See `PageSource`."""
        self.num_used -= 1


def tables_of(page_sets: Iterable[PageSet]) -> list[PageTables]:
    """For the store's check."""
    return [pages.tables for pages in page_sets]
