"""Owners of the pages of a group: a free list, a count of owners per page, and an invariant that can be checked at any time.

Numbers only. A page holds the K and V of `page_size` consecutive entries of every visit of its group. Pages of a prefix may
have several owners: requests, and the prefix index. A page is freed when its last owner lets go, exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PageTable:
    """The pages of one request in one group: entry i is at offset `i % page_size` of page `pages[i // page_size]`."""

    __slots__ = ("pages",)

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self.pages: list[int] = list(pages)


class PageTables(dict[str, PageTable]):
    """The pages of one request: a table for each group, by its name; empty ones at first."""

    def __missing__(self, name: str) -> PageTable:
        self[name] = table = PageTable()
        return table


class PagePool:
    """Pages `0..num_pages - 1`, each free or owned."""

    def __init__(self, *, num_pages: int, page_size: int, name: str) -> None:
        assert num_pages >= 0 and page_size >= 1, (num_pages, page_size)
        self.name, self.num_pages, self.page_size = name, num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def pages_for(self, num_entries: int) -> int:
        """Pages that hold `num_entries` entries."""
        return -(-num_entries // self.page_size)

    def missing(self, table: PageTable, num_entries: int) -> int:
        """Pages that `table` lacks to hold `num_entries` entries."""
        return max(0, self.pages_for(num_entries) - len(table.pages))

    def grow(self, table: PageTable, num_entries: int) -> None:
        """Give `table` the pages that it lacks. The caller has checked that enough are free."""
        count = self.missing(table, num_entries)
        assert count <= len(self._free), f"{self.name}: {count} pages asked for, {len(self._free)} free"
        for _ in range(count):
            page = self._free.pop()
            assert self._owners[page] == 0, f"{self.name}: page {page} was free and has {self._owners[page]} owners"
            self._owners[page] = 1
            table.pages.append(page)

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of `pages`."""
        for page in pages:
            assert self._owners[page] > 0, f"{self.name}: page {page} is free and cannot be shared"
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each of `pages`; those without any are free again."""
        for page in pages:
            assert self._owners[page] > 0, f"{self.name}: page {page} freed twice"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def release_table(self, table: PageTable) -> None:
        """The owner of `table` lets go of all its pages."""
        self.release(table.pages)
        table.pages = []

    def num_owners(self, page: int) -> int:
        """Owners of one page."""
        return self._owners[page]

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Every page is free once and owned by nobody, or owned by exactly those who name it in `owned`."""
        named = Counter(page for pages in owned for page in pages)
        free = Counter(self._free)
        for page in range(self.num_pages):
            counted, claimed = self._owners[page], named[page]
            assert counted == claimed, f"{self.name}: page {page} counts {counted} owners, {claimed} name it"
            assert free[page] == (counted == 0), f"{self.name}: page {page} is {free[page]} times free with {counted} owners"
        strangers = set(named) - set(range(self.num_pages))
        assert not strangers, f"{self.name}: owned pages {sorted(strangers)} do not exist"
