"""The K/V store of decoding: one group of pages for each K/V group of the schedule, asked and returned together.

The schedule says what a group holds, and how many entries a request has there (`architecture.KVGroup`). An entry's address is a
page and an offset; only the planner deals with the position by which its key was rotated. This file stores entries, and knows who
owns which page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_dmtd.architecture import KVGroup, Schedule
from megatron_dmtd.cycle import Method
from megatron_dmtd.inference.kv.codec import Codec, EncodedPages, PageShape
from megatron_dmtd.inference.kv.pages import PagePool, PageTables

#: Numbers of pages, by the name of the group.
PageCounts = dict[str, int]


def page_bytes(schedule: Schedule, codec: Codec, *, page_size: int) -> int:
    """Memory of one page of every group: K and V of all visits."""
    return sum(group.num_places * codec.page_bytes(page_shape(group, page_size)) for group in schedule.kv_groups)


def page_shape(group: KVGroup, page_size: int) -> PageShape:
    """What a page holds of one of the group's visits."""
    return PageShape(page_size=page_size, num_key_value_heads=group.num_key_value_heads, head_dim=group.head_dim)


class GroupStore:
    """K and V of one group, and the owners of its pages."""

    def __init__(
        self, group: KVGroup, codec: Codec, *, num_pages: int, page_size: int, num_scratch_pages: int, device: torch.device
    ) -> None:
        self.group = group
        self.pages = PagePool(num_pages=num_pages, page_size=page_size, name=group.name)
        shape, total = page_shape(group, page_size), num_pages + num_scratch_pages
        self.places: tuple[EncodedPages, ...] = tuple(
            codec.allocate(shape, num_pages=total, device=device) for _ in range(group.num_places)
        )
        """K and V of each of the group's visits."""


class KVStore:
    """All groups. A request's pages are one table per group, so that no request holds a part of what it needs."""

    def __init__(
        self,
        schedule: Schedule,
        codec: Codec,
        *,
        num_pages: int,
        page_size: int,
        num_scratch_pages: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Args:
        schedule: Its K/V groups are the store's.
        codec: The format of all pages.
        num_pages: Pages of each group.
        page_size: Entries per page.
        num_scratch_pages: Additional pages after those of each group; they have no owner and hold nothing between steps.
        device: Where the pages are.
        """
        self.method: Method = schedule.method
        self.page_size, self.num_pages, self.num_scratch_pages = page_size, num_pages, num_scratch_pages
        self.groups: Mapping[str, GroupStore] = {
            group.name: GroupStore(
                group,
                codec,
                num_pages=num_pages,
                page_size=page_size,
                num_scratch_pages=num_scratch_pages,
                device=torch.device(device),
            )
            for group in schedule.kv_groups
        }

    def num_entries(self, num_tokens: int) -> dict[str, int]:
        """Entries, by group, of a request that has taken `num_tokens` tokens."""
        return {name: store.group.num_entries(self.method, num_tokens) for name, store in self.groups.items()}

    def missing(self, tables: PageTables, num_tokens: int) -> PageCounts:
        """Pages that `tables` lacks to hold `num_tokens` tokens."""
        return {
            name: store.pages.missing(tables[name], store.group.num_entries(self.method, num_tokens))
            for name, store in self.groups.items()
        }

    def has_free(self, counts: PageCounts) -> bool:
        """Whether that many pages are free in every group."""
        return all(counts[name] <= store.pages.num_free for name, store in self.groups.items())

    def grow(self, tables: PageTables, num_tokens: int) -> None:
        """Give `tables` the pages that it lacks to hold `num_tokens` tokens."""
        for name, store in self.groups.items():
            store.pages.grow(tables[name], store.group.num_entries(self.method, num_tokens))

    def share(self, tables: PageTables) -> None:
        """One more owner for every page of `tables`."""
        for name, store in self.groups.items():
            store.pages.share(tables[name].pages)

    def release(self, tables: PageTables) -> None:
        """Return every page of `tables`."""
        for name, store in self.groups.items():
            store.pages.release_table(tables[name])

    def is_sole_owner(self, tables: PageTables) -> bool:
        """Whether nobody else owns any page of `tables`."""
        return all(store.pages.num_owners(page) == 1 for name, store in self.groups.items() for page in tables[name].pages)

    def check_integrity(self, tables: Iterable[PageTables]) -> None:
        """Check the pages of every group, given everything that owns some."""
        owned = list(tables)
        for name, store in self.groups.items():
            store.pages.check_integrity(table[name].pages for table in owned)
