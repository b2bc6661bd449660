"""A pass as tensors: rows of a plan, where their K and V go, and what they read of each K/V group.

Made once per step and pass, and used by every visit. Nothing here grows with the length of texts: the pages of requests are in
tables that are kept between steps.

Shape legend: R rows of a pass, S slots, P pages, B chunks of equally many rows, N rows of such a chunk, Q queries of it, K keys,
T entries per page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from megatron_dmtd.architecture import KVGroup
from megatron_dmtd.inference.cache_ops.passes import PassViews
from megatron_dmtd.inference.kv.device_tables import DeviceTable
from megatron_dmtd.inference.planner import OWN_PAGES, Reads, Rows


class Stored(NamedTuple):
    """Rows of a pass whose K and V are stored in a group, and the addresses where."""

    row: torch.Tensor | slice
    page: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Chunks of equally many rows, whose attention is one batched call."""

    query_BQ: torch.Tensor
    """Rows of the pass, as queries."""
    local_BN: torch.Tensor | None
    """Rows of the pass whose K and V are read without being stored, after those of the pages."""
    page_BP: torch.Tensor
    """Pages that are read."""
    mask_BQK: torch.Tensor
    """Which keys each query reads: those of the pages, then the rows of `local_BN`."""


class Addresses(Protocol):
    """Where the rows of a pass store and read K and V in one group, for attention in torch."""

    @property
    def stored(self) -> Stored:
        """The rows that are stored, and where."""

    def batches(self, *, final_only: bool) -> Sequence[AttentionBatch]:
        """Attention of all rows, or of the final ones; `query_BQ` counts all rows either way."""


class RowsInLayers(Protocol):
    """Rows that go through the visits of one pass: what a model needs to know about them."""

    @property
    def token_id_R(self) -> torch.Tensor:
        """Ids to embed."""

    @property
    def position_R(self) -> torch.Tensor:
        """Positions, for rotary angles."""

    @property
    def slot_R(self) -> torch.Tensor:
        """Slots of the rows' requests."""

    @property
    def phase_R(self) -> torch.Tensor:
        """Slots of the rows' tokens in their cycles."""

    @property
    def final(self) -> Sequence[int]:
        """Rows whose hidden states leave the last visit; the others end at its K and V."""

    @property
    def final_R(self) -> torch.Tensor:
        """The same as an index."""

    @property
    def ends_early(self) -> bool:
        """Whether some rows do not leave the last visit."""

    @property
    def views(self) -> PassViews | None:
        """What requests with cache operations read and copy; None without any."""

    @property
    def num_loops(self) -> int:
        """How often looped layers run, at most."""

    def in_loop(self, loop: int) -> tuple[RowsInLayers, torch.Tensor | None]:
        """The rows for which looped layers run at least `loop` times, and their indices; None: all of them."""

    def addresses(self, group: str) -> Addresses:
        """Addresses in one of the K/V groups that the pass writes."""


@dataclass(frozen=True, slots=True)
class QueryRuns:
    """Queries of a pass by chunk: chunk c has queries `[query_start[c], query_start[c + 1])` of `row`, and rows of the pass
    `[row_start[c], row_start[c + 1])`.
    """

    row: torch.Tensor
    query_start: torch.Tensor
    row_start: torch.Tensor
    num_queries: int
    native: tuple[int, int, int, int]
    """Addresses of the three, and the number of chunks: arguments of native kernels."""


#: A batch by its chunks: the queries of each, and all of its rows.
_Members = list[tuple[list[int], range]]
#: Columns of `Pass.numbers` and `StaticPass.numbers_WBN`; after them come those of `Reads`, once for each window or group.
TOKEN_ID, POSITION, SLOT, PHASE, ENTRY = range(5)
NUM_COLUMNS = 5


class GroupColumns:
    """The K/V groups that one pass of the schedule writes, and where the columns of each stand among those of its rows."""

    def __init__(self, groups: Sequence[KVGroup], tables: Mapping[str, DeviceTable]) -> None:
        self.windows = tuple(dict.fromkeys(group.window for group in groups))
        first = [NUM_COLUMNS + len(Reads._fields) * index for index in range(len(self.windows))]
        self.first_column = {group.name: first[self.windows.index(group.window)] for group in groups}
        self.window = {group.name: group.window for group in groups}
        self.table = {group.name: tables[group.name] for group in groups}
        self.device = tables[groups[0].name].page_SP.device


@dataclass(kw_only=True)
class Pass:
    """Rows of any number, in no particular shape."""

    rows: Rows
    slots: Sequence[int]
    """Slot of each row, as Python numbers."""
    final: Sequence[int]
    """See `RowsInLayers`."""
    groups: GroupColumns
    page_size: int
    views: PassViews | None = None
    """See `RowsInLayers`."""
    loops: Sequence[int] = (1,)
    """Of each row, how often looped layers run; one number: of all rows."""
    numbers: torch.Tensor = field(init=False)
    """Columns `[number of columns, R]`."""

    def __post_init__(self) -> None:
        rows = self.rows
        columns = [rows.token_id, rows.position, self.slots, rows.phase, rows.entry]
        for window in self.groups.windows:
            columns += rows.reads(window)
        self.numbers = torch.tensor(columns, dtype=torch.int64).to(self.groups.device, non_blocking=True)
        self._addresses: dict[str, GroupAddresses] = {}
        self._in_loop: dict[int, tuple[Pass, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def addresses(self, group: str) -> GroupAddresses:
        """See `RowsInLayers`."""
        found = self._addresses.get(group)
        if found is None:
            found = self._addresses[group] = GroupAddresses(self, group)
        return found

    @property
    def token_id_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers[TOKEN_ID]

    @property
    def position_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers[POSITION]

    @property
    def slot_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers[SLOT]

    @property
    def phase_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers[PHASE]

    @property
    def entry_R(self) -> torch.Tensor:
        """Entries that are stored; -1: none."""
        return self.numbers[ENTRY]

    @property
    def ends_early(self) -> bool:
        """See `RowsInLayers`."""
        return len(self.final) < len(self)

    @cached_property
    def final_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return torch.tensor(self.final, dtype=torch.int64, device=self.numbers.device)

    @property
    def num_loops(self) -> int:
        """See `RowsInLayers`."""
        return max(self.loops)

    def in_loop(self, loop: int) -> tuple[Pass, torch.Tensor | None]:
        """See `RowsInLayers`."""
        if loop <= min(self.loops):
            return self, None
        known = self._in_loop.get(loop)
        if known is None:
            kept = [row for row, loops in enumerate(self.loops) if loops >= loop]
            part = Pass(
                rows=self.rows.select(kept),
                slots=[self.slots[row] for row in kept],
                final=range(len(kept)),
                groups=self.groups,
                page_size=self.page_size,
                views=None if self.views is None else self.views.select(kept),
                loops=[self.loops[row] for row in kept],
            )
            known = self._in_loop[loop] = part, torch.tensor(kept, device=self.numbers.device)
        return known

    @cached_property
    def chunk_runs(self) -> list[tuple[int, int]]:
        """The rows of each chunk, of each of its views, as half-open ranges."""
        return runs_of(self.row_kinds)

    @cached_property
    def row_kinds(self) -> Sequence[object]:
        """Rows with the same kind read the same pages."""
        return self.rows.chunk if self.views is None else list(zip(self.rows.chunk, self.rows.view))

    # For native kernels.

    @cached_property
    def column_pointers(self) -> list[int]:
        """Addresses of the columns of `numbers`."""
        start, column_bytes = self.numbers.data_ptr(), self.numbers.stride(0) * self.numbers.itemsize
        return [start + column * column_bytes for column in range(len(self.numbers))]

    @cached_property
    def all_runs(self) -> QueryRuns:
        """Attention of all rows."""
        return self._query_runs(range(len(self)))

    @cached_property
    def final_runs(self) -> QueryRuns:
        """Attention of the final rows alone."""
        return self._query_runs(self.final)

    def _query_runs(self, queries: Sequence[int]) -> QueryRuns:
        row_start = [start for start, _ in self.chunk_runs] + [len(self)]
        query_start = [bisect_left(queries, start) for start in row_start]
        columns = torch.tensor(queries), torch.tensor(query_start), torch.tensor(row_start)
        row, first_query, first_row = (column.data_ptr() for column in columns)
        return QueryRuns(*columns, len(queries), (row, first_query, first_row, len(row_start) - 1))

    # For attention in torch.

    @cached_property
    def all_members(self) -> list[_Members]:
        """Attention of all rows: chunks by their numbers of queries and of rows."""
        return self._members(range(len(self)))

    @cached_property
    def final_members(self) -> list[_Members]:
        """The same of the final rows alone."""
        return self._members(self.final)

    def _members(self, queries: Sequence[int]) -> list[_Members]:
        kinds = self.row_kinds
        chunk_rows = {kinds[start]: range(start, stop) for start, stop in self.chunk_runs}
        by_shape: dict[tuple[int, int, bool], _Members] = {}
        for start, stop in runs_of([kinds[row] for row in queries]):
            own = list(queries[start:stop])
            rows = chunk_rows[kinds[own[0]]]
            by_shape.setdefault((len(own), len(rows), self.rows.view[own[0]] == OWN_PAGES), []).append((own, rows))
        return list(by_shape.values())


class GroupAddresses:
    """What the rows of a pass store and read in one group."""

    def __init__(self, run: Pass, group: str) -> None:
        self._run, self._group, self._window = run, group, run.groups.window[group]
        self.table, self.first_column = run.groups.table[group], run.groups.first_column[group]
        self._batches: dict[bool, list[AttentionBatch]] = {}

    @cached_property
    def native_table(self) -> tuple[int, int]:
        """Address of the table of pages and its columns: arguments of native kernels."""
        return self.table.page_SP.data_ptr(), self.table.page_SP.shape[1]

    @cached_property
    def native_reads(self) -> tuple[int, ...]:
        """Addresses of the columns of `Reads`."""
        return tuple(self._run.column_pointers[self.first_column : self.first_column + len(Reads._fields)])

    @cached_property
    def stored(self) -> Stored:
        """See `Addresses`."""
        run = self._run
        row = (run.entry_R >= 0).nonzero()[:, 0]
        entry = run.entry_R[row]
        number = torch.div(entry, run.page_size, rounding_mode="floor")
        if run.views is None:
            page = self.table.page_SP[run.slot_R[row], number]
        else:
            page = run.views.pages(self._group, self.table.page_SP)[run.views.table_R[row], number]
        return Stored(row, page, entry.remainder(run.page_size))

    def batches(self, *, final_only: bool) -> list[AttentionBatch]:
        """See `Addresses`."""
        if final_only not in self._batches:
            members = self._run.final_members if final_only else self._run.all_members
            self._batches[final_only] = [self._batch(one) for one in members]
        return self._batches[final_only]

    def _batch(self, members: _Members) -> AttentionBatch:
        run, reads, device = self._run, self._run.rows.reads(self._window), self._run.numbers.device
        query_BQ = torch.tensor([own for own, _ in members], device=device)
        local_BN = torch.tensor([list(rows) for _, rows in members], device=device)
        columns = run.numbers[self.first_column : self.first_column + len(Reads._fields)]
        entry_begin, entry_end, local_begin, local_end = (column[query_BQ][..., None] for column in columns)
        if run.views is not None and run.rows.view[members[0][0][0]] != OWN_PAGES:
            page_BP, entry_BK = run.views.read(self._group, [run.rows.view[own[0]] for own, _ in members])
        else:
            page_BP, entry_BK = self._own_pages(members, query_BQ, reads)
        mask_BQK = (entry_BK[:, None] >= entry_begin) & (entry_BK[:, None] < entry_end)
        has_local = any(reads.local_end[row] > 0 for own, _ in members for row in own)
        if has_local:
            local_BQN = (local_BN[:, None] >= local_begin) & (local_BN[:, None] < local_end)
            mask_BQK = torch.cat([mask_BQK, local_BQN], dim=-1)
        return AttentionBatch(query_BQ, local_BN if has_local else None, page_BP, mask_BQK)

    def _own_pages(self, members: _Members, query_BQ: torch.Tensor, reads: Reads) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages `[B, P]` of plain requests, and the entries `[B, K]` that they hold."""
        run, device = self._run, self._run.numbers.device
        first_pages = [min(reads.entry_begin[row] for row in own) // run.page_size for own, _ in members]
        ends = [-(-max(reads.entry_end[row] for row in own) // run.page_size) for own, _ in members]
        num_pages = max(end - first for end, first in zip(ends, first_pages))
        first_B = torch.tensor(first_pages, device=device)
        return pages_from(self.table.page_SP[run.slot_R[query_BQ[:, 0]]], first_B, num_pages, run.page_size)


def pages_from(
    table_BP: torch.Tensor, first_B: torch.Tensor, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`num_pages` pages of each table from `first` on, `[B, P]`, and the entries that they hold, `[B, P * T]`.

    Beyond the end of a table its last page is repeated; the numbers of its entries go on, so every mask hides them.
    """
    number_BP = first_B[:, None] + torch.arange(num_pages, device=first_B.device)
    page_BP = table_BP.gather(1, number_BP.clamp(max=table_BP.shape[1] - 1))
    entry_BK = first_B[:, None] * page_size + torch.arange(num_pages * page_size, device=first_B.device)
    return page_BP, entry_BK


def runs_of(values: Sequence[object]) -> list[tuple[int, int]]:
    """Runs of equal neighbours, as half-open ranges."""
    starts = [index for index, value in enumerate(values) if index == 0 or value != values[index - 1]]
    return list(zip(starts, [*starts[1:], len(values)]))
