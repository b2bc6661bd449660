"""Which prefixes have pages in every group of the store, so that later requests need not compute them again.

Numbers only. An entry is one page of tokens after its parent entry, with the page of every group that holds them. It exists only
once all are final: in sequential layers when its tokens have been taken; in parallel ones with shadow history when its blocks are
stored (they depend on the cycle heads up to the page's end only, since pages hold whole cycles), and with real history when its
last cycle has been refreshed. So reuse is exact in all variants, and the block of an unfinished cycle, or a cycle not yet
refreshed, is never part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dmtd.inference.kv.pages import PageTable, PageTables
from megatron_dmtd.inference.kv.store import KVStore

#: The parent of first pages; those of other keys have a smaller one. Entries have larger numbers.
ROOT = 0


@dataclass(frozen=True, slots=True)
class Known:
    """How much of a sequence is in the index: its last entry, and its number of pages."""

    entry_id: int = ROOT
    num_pages: int = 0


@dataclass(slots=True)
class _Entry:
    entry_id: int
    parent: int
    tokens: tuple[int, ...]
    tables: PageTables
    """One page of each group."""
    num_children: int = 0
    last_use: int = 0
    """Time of its last use, on the index's clock."""
    is_queued: bool = False
    """Whether the index's queue names it."""


class PrefixIndex:
    """Entries by (parent, tokens), of which the least recently used ones go first. It is an owner of its pages."""

    def __init__(self, store: KVStore) -> None:
        self.store, self.page_size = store, store.page_size
        assert self.page_size == store.method.cycle_start(self.page_size), "pages must hold whole cycles"
        self._entries: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._by_id: dict[int, _Entry] = {}
        self._next_id = ROOT + 1
        self._clock = 0
        self._queue: list[tuple[int, int]] = []
        """A heap of (last use, id) with every leaf once. Uses since it was queued are looked up when its turn comes."""
        self.num_reused_tokens = 0
        """Tokens that requests did not have to compute, since the start."""

    def __len__(self) -> int:
        return len(self._entries)

    def _page(self, tokens: Sequence[int], number: int) -> tuple[int, ...]:
        return tuple(tokens[number * self.page_size : (number + 1) * self.page_size])

    def _chain(self, tokens: Sequence[int], num_pages: int, key: int) -> Iterator[_Entry]:
        """Entries of the first `num_pages` pages of `tokens`, until one is missing; each becomes the most recently used."""
        parent = ROOT - key
        for number in range(num_pages):
            entry = self._entries.get((parent, self._page(tokens, number)))
            if entry is None:
                return
            self._use(entry)
            parent = entry.entry_id
            yield entry

    def _use(self, entry: _Entry) -> None:
        self._clock += 1
        entry.last_use = self._clock

    def _enqueue(self, entry: _Entry) -> None:
        if not entry.is_queued:
            heapq.heappush(self._queue, (entry.last_use, entry.entry_id))
            entry.is_queued = True

    def attach(self, tokens: Sequence[int], *, key: int = 0, whole: int = 1) -> tuple[PageTables, Known]:
        """Shared pages of the longest known prefix of `tokens` but its last one, which must be computed.

        Args:
            tokens: The text.
            key: See `add`.
            whole: Only a prefix of a multiple of so many tokens will do.
        """
        found = list(self._chain(tokens, (len(tokens) - 1) // self.page_size, key))
        while len(found) * self.page_size % whole:
            found.pop()
        tables = PageTables()
        for name in self.store.groups:
            tables[name] = PageTable(page for entry in found for page in entry.tables[name].pages)
        self.store.share(tables)
        return tables, Known(found[-1].entry_id, len(found)) if found else Known()

    def num_final_pages(self, num_taken: int) -> int:
        """Leading pages of a request whose contents will not change any more."""
        return min(num_taken, *self.store.num_entries(num_taken).values()) // self.page_size

    def add(self, tokens: Sequence[int], tables: PageTables, num_taken: int, known: Known, *, key: int = 0) -> Known:
        """Make the request's final pages known. A page that is known already keeps its first copy.

        Requests with another `key`, not negative, compute other K and V of the same tokens, and share nothing with this one.
        `known` is what an earlier call for the same request gave, so that work does not grow with its length; if that entry has
        been forgotten since, the pages are looked up from the start.
        """
        if known.entry_id > ROOT and known.entry_id not in self._by_id:
            known = Known()
        parent = known.entry_id if known.entry_id > ROOT else ROOT - key
        for number in range(known.num_pages, self.num_final_pages(num_taken)):
            place = (parent, self._page(tokens, number))
            entry = self._entries.get(place) or self._new_entry(place, tables, number)
            self._use(entry)
            parent = entry.entry_id
        if parent > ROOT and self._by_id[parent].num_children == 0:
            self._enqueue(self._by_id[parent])
        return Known(parent, max(known.num_pages, self.num_final_pages(num_taken)))

    def _new_entry(self, key: tuple[int, tuple[int, ...]], tables: PageTables, number: int) -> _Entry:
        pages = slice(number, number + 1)
        owned = PageTables({name: PageTable(tables[name].pages[pages]) for name in self.store.groups})
        self.store.share(owned)
        parent, page_tokens = key
        entry = _Entry(self._next_id, parent, page_tokens, owned)
        self._next_id += 1
        self._entries[key] = self._by_id[entry.entry_id] = entry
        if parent > ROOT:
            self._by_id[parent].num_children += 1
        return entry

    def evict_one(self) -> bool:
        """Remove one entry without children: the least recently used one whose pages nobody else owns, or else any, since its
        parent may then be removed. False if there is none.

        A request's pages are on one path, so at most one leaf per request is skipped, however many leaves there are.
        """
        passed_over: list[_Entry] = []
        victim = None
        while victim is None and (leaf := self._pop_leaf()) is not None:
            if self._is_sole_owner(leaf):
                victim = leaf
            else:
                passed_over.append(leaf)
        if victim is None and passed_over:
            victim = passed_over.pop(0)
        for leaf in passed_over:
            self._enqueue(leaf)
        if victim is not None:
            self._remove(victim)
        return victim is not None

    def _pop_leaf(self) -> _Entry | None:
        """Take the least recently used leaf from the queue."""
        while self._queue:
            queued_use, entry_id = heapq.heappop(self._queue)
            entry = self._by_id[entry_id]
            entry.is_queued = False
            if entry.num_children == 0:
                if queued_use == entry.last_use:
                    return entry
                self._enqueue(entry)
        return None

    def _is_sole_owner(self, entry: _Entry) -> bool:
        return self.store.is_sole_owner(entry.tables)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.parent, entry.tokens]
        del self._by_id[entry.entry_id]
        if entry.parent > ROOT:
            parent = self._by_id[entry.parent]
            parent.num_children -= 1
            if parent.num_children == 0:
                self._enqueue(parent)
        self.store.release(entry.tables)

    def clear(self) -> None:
        """Remove everything."""
        for entry in self._entries.values():
            self.store.release(entry.tables)
        self._entries.clear()
        self._by_id.clear()
        self._queue.clear()

    def owned(self) -> Iterator[PageTables]:
        """What the index owns, for the store's check."""
        return (entry.tables for entry in self._entries.values())
