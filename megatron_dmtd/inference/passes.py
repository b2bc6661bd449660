"""A pass as tensors: rows of a plan, where their K and V go, and what they read.

Made once per step and half, and used by every layer of the half. Nothing here grows with the length of texts: pages of requests
stand in a table that is kept between steps.

Shape legend: R rows, S slots, P pages of the longest request, B chunks with equally many rows, r rows of such a chunk, n pages
read, K keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron_dmtd.inference.kv.pages import PageTable
from megatron_dmtd.inference.planner import Rows


class BlockTables:
    """The pages of every slot in one pool, on the device."""

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.page_SP = torch.zeros((num_slots, max_pages), dtype=torch.int64, device=device)
        self._known: list[tuple[PageTable | None, int]] = [(None, 0)] * num_slots

    def update(self, slot: int, table: PageTable) -> None:
        """Add the pages of `table` that have come since the last call for `slot`; all of them if it was another table."""
        owner, known = self._known[slot]
        if owner is not table:
            known = 0
        if known < len(table.pages):
            self.page_SP[slot, known : len(table.pages)] = torch.tensor(table.pages[known:], dtype=torch.int64)
        self._known[slot] = (table, len(table.pages))


@dataclass(frozen=True, slots=True)
class Group:
    """Chunks with equally many rows, whose attention is one batched call."""

    query_Br: torch.Tensor
    """Rows of the pass, as queries."""
    key_Br: torch.Tensor | None
    """Rows of the pass whose K and V are read without being stored, after those of the pages."""
    page_Bn: torch.Tensor
    """Pages that are read."""
    mask_BrK: torch.Tensor
    """Which keys each query reads: those of the pages, then the rows of `key_Br`."""


@dataclass(frozen=True, slots=True)
class QueryRuns:
    """Queries of a pass by chunk: chunk c has queries `[query_start[c], query_start[c + 1])` of `row`, and rows of the pass
    `[row_start[c], row_start[c + 1])`.
    """

    row: torch.Tensor
    query_start: torch.Tensor
    row_start: torch.Tensor


@dataclass(kw_only=True)
class Pass:
    """Rows on their way through the layers of one half."""

    rows: Rows
    slots: Sequence[int]
    """Slot of each row, as Python numbers."""
    final: Sequence[int]
    """Rows whose hidden states leave the last layer; the others end at its K and V."""
    tables: BlockTables
    page_size: int
    numbers_NR: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = self.rows
        columns = [rows.token_id, rows.position, self.slots, rows.history_length, rows.local_begin, rows.local_end]
        host = torch.tensor([*columns, rows.is_written], dtype=torch.int64)
        self.numbers_NR = host.to(self.tables.page_SP.device, non_blocking=True)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def token_id_R(self) -> torch.Tensor:
        """Ids to embed."""
        return self.numbers_NR[0]

    @property
    def position_R(self) -> torch.Tensor:
        """Positions, for rotary angles and for the entries written."""
        return self.numbers_NR[1]

    @property
    def slot_R(self) -> torch.Tensor:
        """Slots of the rows' requests."""
        return self.numbers_NR[2]

    @property
    def ends_early(self) -> bool:
        """Whether some rows do not leave the last layer."""
        return len(self.final) < len(self)

    @cached_property
    def final_F(self) -> torch.Tensor:
        """`final` as an index."""
        return torch.tensor(self.final, dtype=torch.int64, device=self.numbers_NR.device)

    @cached_property
    def max_rows_per_chunk(self) -> int:
        """Rows of the largest chunk."""
        return max(stop - start for start, stop in runs_of(self.rows.chunk))

    @cached_property
    def column_pointers(self) -> list[int]:
        """Addresses of the columns of `numbers_NR`."""
        start, row_bytes = self.numbers_NR.data_ptr(), self.numbers_NR.stride(0) * self.numbers_NR.itemsize
        return [start + column * row_bytes for column in range(len(self.numbers_NR))]

    @cached_property
    def all_runs(self) -> QueryRuns:
        """Attention of all rows, for the native kernel."""
        return self._query_runs(range(len(self)))

    @cached_property
    def final_runs(self) -> QueryRuns:
        """Attention of the final rows alone, for the native kernel."""
        return self._query_runs(self.final)

    def _query_runs(self, queries: Sequence[int]) -> QueryRuns:
        row_start = [start for start, _ in runs_of(self.rows.chunk)] + [len(self)]
        query_start = [bisect_left(queries, start) for start in row_start]
        return QueryRuns(torch.tensor(queries), torch.tensor(query_start), torch.tensor(row_start))

    # For attention in torch; native kernels read `numbers_NR` alone.

    @cached_property
    def written(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(row, page, entry in the page)` of the rows whose K and V are stored."""
        row = self.numbers_NR[6].nonzero()[:, 0]
        position = self.position_R[row]
        page = self.tables.page_SP[self.slot_R[row], torch.div(position, self.page_size, rounding_mode="floor")]
        return row, page, position.remainder(self.page_size)

    @cached_property
    def groups(self) -> list[Group]:
        """Attention of all rows."""
        return self._groups(range(len(self)))

    @cached_property
    def final_groups(self) -> list[Group]:
        """Attention of the final rows alone; `query_Br` still counts all rows."""
        return self._groups(self.final)

    def _groups(self, queries: Sequence[int]) -> list[Group]:
        """Chunks by their numbers of queries and of rows."""
        chunk_rows = {self.rows.chunk[start]: range(start, stop) for start, stop in runs_of(self.rows.chunk)}
        by_shape: dict[tuple[int, int], list[tuple[list[int], range]]] = {}
        for start, stop in runs_of([self.rows.chunk[row] for row in queries]):
            own = list(queries[start:stop])
            keys = chunk_rows[self.rows.chunk[own[0]]]
            by_shape.setdefault((len(own), len(keys)), []).append((own, keys))
        return [self._group([own for own, _ in members], [keys for _, keys in members]) for members in by_shape.values()]

    def _group(self, queries: list[list[int]], keys: list[range]) -> Group:
        device = self.numbers_NR.device
        query_Br = torch.tensor(queries, device=device)
        key_Br = torch.tensor([list(rows) for rows in keys], device=device)
        longest = max(self.rows.history_length[row] for own in queries for row in own)
        num_pages = -(-longest // self.page_size)
        history_Br1, begin_Br1, end_Br1 = (self.numbers_NR[column][query_Br][..., None] for column in (3, 4, 5))
        mask_BrK = torch.arange(num_pages * self.page_size, device=device) < history_Br1
        has_local = any(self.rows.local_end[row] > 0 for own in queries for row in own)
        if has_local:
            local_BrK = (key_Br[:, None] >= begin_Br1) & (key_Br[:, None] < end_Br1)
            mask_BrK = torch.cat([mask_BrK, local_BrK], dim=-1)
        page_Bn = self.tables.page_SP[self.slot_R[query_Br[:, 0]], :num_pages]
        return Group(query_Br, key_Br if has_local else None, page_Bn, mask_BrK)


def runs_of(values: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of equal neighbours."""
    starts = [index for index, value in enumerate(values) if index == 0 or value != values[index - 1]]
    return list(zip(starts, [*starts[1:], len(values)]))
