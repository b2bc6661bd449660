"""A pass in one of a few shapes, so that a device can record it once and replay it: decoding steps, one token per request.

The number of chunks is padded to a power of two, and so is the number of pages that each chunk reads of a group. Every row stores
its K and V: those that are not kept go to a scratch page of the slot, where the other rows of a shadow block read them during the
visit. Padding rows belong to an additional slot without a request. Everything that changes from step to step is in `numbers_WBN`
and in the page tables, whose addresses are fixed; everything else is computed from them on the device. The columns are those of
`passes`, then those of `Reads` for each group, in which local rows count from the first of their block.

Shape legend: W columns, B chunks, N rows of a chunk, Q queries of it, R rows of the pass, S slots, P pages read, T entries per
page, K keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dmtd.architecture import KVGroup
from megatron_dmtd.inference.kv.device_tables import DeviceTable
from megatron_dmtd.inference.passes import (
    ENTRY,
    NUM_COLUMNS,
    PHASE,
    POSITION,
    SLOT,
    TOKEN_ID,
    AttentionBatch,
    Stored,
    pages_from,
    runs_of,
)
from megatron_dmtd.inference.planner import Reads, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """The shape that a recording serves."""

    num_chunks: int
    rows_per_chunk: int
    final_per_chunk: int
    """Rows at the end of each chunk that leave the last visit."""
    num_pages: tuple[int, ...]
    """Pages that every chunk reads of each group."""
    has_local: bool
    """Whether rows also read the scratch page of their slot."""
    num_loops: int = 1
    """How often looped layers run."""


def padded(count: int, limit: int) -> int:
    """The next power of two, at most `limit`."""
    assert 1 <= count <= limit, (count, limit)
    return min(limit, 1 << (count - 1).bit_length())


def num_pages_read(rows: Rows, window: int | None, page_size: int) -> int:
    """The largest number of pages that a chunk reads of a group, at least 1."""
    reads = rows.reads(window)
    spans = [
        -(-max(reads.entry_end[start:stop]) // page_size) - min(reads.entry_begin[start:stop]) // page_size
        for start, stop in runs_of(rows.chunk)
    ]
    return max(1, *spans)


class StaticPass:
    """Rows in a recurring shape; see `passes.RowsInLayers`."""

    def __init__(
        self,
        shape: StaticShape,
        groups: Sequence[KVGroup],
        tables: Mapping[str, DeviceTable],
        *,
        first_scratch_page: int,
        page_size: int,
    ) -> None:
        self.shape, self.groups = shape, groups
        self.views = None
        self.first_scratch_page, self.page_size = first_scratch_page, page_size
        page_SP = tables[groups[0].name].page_SP
        self.final: Sequence[int] = range(shape.num_chunks * shape.final_per_chunk)
        # A row of nobody reads one entry, so that it stays finite.
        self._blank = (0, 0, len(page_SP) - 1, 0, -1) + (0, 1, 0, 0) * len(groups)
        size = (len(self._blank), shape.num_chunks, shape.rows_per_chunk)
        self.numbers_WBN = torch.zeros(size, dtype=torch.int64, device=page_SP.device)
        self._addresses = {group.name: StaticAddresses(self, tables[group.name], index) for index, group in enumerate(groups)}

    def fill(self, rows: Rows, slots: Sequence[int]) -> None:
        """Take the rows of a step, given the slot of each. Chunks with too few rows are padded at their beginning."""
        shape = self.shape
        columns = [rows.token_id, rows.position, slots, rows.phase, rows.entry]
        for group in self.groups:
            reads = rows.reads(group.window)
            local = ([end - first for end, first in zip(ends, rows.local_begin)] for ends in (reads.local_begin, reads.local_end))
            columns += [reads.entry_begin, reads.entry_end, *local]
        numbers = list(zip(*columns))
        table: list[tuple[int, ...]] = []
        for start, stop in runs_of(rows.chunk):
            table += [self._blank] * (shape.rows_per_chunk - (stop - start)) + numbers[start:stop]
        table += [self._blank] * (shape.num_chunks * shape.rows_per_chunk - len(table))
        host = torch.tensor(table, dtype=torch.int64).view(shape.num_chunks, shape.rows_per_chunk, -1)
        self.numbers_WBN.copy_(host.permute(2, 0, 1))

    def begin(self) -> None:
        """Forget what was computed from the numbers of an earlier step."""
        self.__dict__.pop("final_R", None)
        for addresses in self._addresses.values():
            addresses.begin()

    def addresses(self, group: str) -> StaticAddresses:
        """See `RowsInLayers`."""
        return self._addresses[group]

    @property
    def token_id_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers_WBN[TOKEN_ID].flatten()

    @property
    def position_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers_WBN[POSITION].flatten()

    @property
    def slot_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers_WBN[SLOT].flatten()

    @property
    def slot_B(self) -> torch.Tensor:
        """Slots of the chunks; rows that fill one up come first."""
        return self.numbers_WBN[SLOT, :, -1]

    @property
    def phase_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.numbers_WBN[PHASE].flatten()

    @property
    def entry_R(self) -> torch.Tensor:
        """Entries that are stored; -1: on a scratch page."""
        return self.numbers_WBN[ENTRY].flatten()

    @property
    def ends_early(self) -> bool:
        """See `RowsInLayers`."""
        return self.shape.final_per_chunk < self.shape.rows_per_chunk

    @cached_property
    def final_R(self) -> torch.Tensor:
        """See `RowsInLayers`."""
        return self.rows_BN()[:, -self.shape.final_per_chunk :].flatten()

    @property
    def first_local_row(self) -> int:
        """The row of each chunk where its shadow block begins."""
        return self.shape.rows_per_chunk - self.shape.final_per_chunk

    @property
    def num_loops(self) -> int:
        """See `RowsInLayers`."""
        return self.shape.num_loops

    def in_loop(self, loop: int) -> tuple[StaticPass, None]:
        """See `RowsInLayers`. All rows take part in every loop."""
        return self, None

    def rows_BN(self) -> torch.Tensor:
        """Rows of the pass, by chunk."""
        shape = self.shape
        return torch.arange(shape.num_chunks * shape.rows_per_chunk, device=self.numbers_WBN.device).view(shape.num_chunks, -1)


class StaticAddresses:
    """What the rows of a static pass store and read in one group; see `passes.Addresses`."""

    def __init__(self, run: StaticPass, table: DeviceTable, index: int) -> None:
        self._run, self._table = run, table
        self._num_pages = run.shape.num_pages[index]
        self._first_column = NUM_COLUMNS + len(Reads._fields) * index
        self._batches: dict[bool, list[AttentionBatch]] = {}

    def begin(self) -> None:
        """Forget what was computed from the numbers of an earlier step."""
        self.__dict__.pop("stored", None)
        self._batches.clear()

    @cached_property
    def stored(self) -> Stored:
        """Every row, wherever it is stored. Local rows lie in the order of their positions."""
        run = self._run
        is_kept_R, entry_R = run.entry_R >= 0, run.entry_R.clamp(min=0)
        own_page_R = self._table.page_SP[run.slot_R, torch.div(entry_R, run.page_size, rounding_mode="floor")]
        page_R = torch.where(is_kept_R, own_page_R, run.first_scratch_page + run.slot_R)
        row_in_block_R = (run.rows_BN() % run.shape.rows_per_chunk - run.first_local_row).clamp(min=0).flatten()
        return Stored(slice(None), page_R, torch.where(is_kept_R, entry_R.remainder(run.page_size), row_in_block_R))

    def batches(self, *, final_only: bool) -> list[AttentionBatch]:
        """See `Addresses`."""
        if final_only not in self._batches:
            shape = self._run.shape
            self._batches[final_only] = [self._batch(shape.final_per_chunk if final_only else shape.rows_per_chunk)]
        return self._batches[final_only]

    def _batch(self, num_queries: int) -> AttentionBatch:
        run, columns = self._run, slice(self._first_column, self._first_column + len(Reads._fields))
        entry_begin, entry_end, local_begin, local_end = run.numbers_WBN[columns, :, -num_queries:, None]
        first_B = torch.div(entry_begin.amin(dim=(1, 2)), run.page_size, rounding_mode="floor")
        page_BP, entry_BK = pages_from(self._table.page_SP[run.slot_B], first_B, self._num_pages, run.page_size)
        mask_BQK = (entry_BK[:, None] >= entry_begin) & (entry_BK[:, None] < entry_end)
        if run.shape.has_local:
            offset_T = torch.arange(run.page_size, device=page_BP.device)
            page_BP = torch.cat([page_BP, run.first_scratch_page + run.slot_B[:, None]], dim=1)
            mask_BQK = torch.cat([mask_BQK, (offset_T >= local_begin) & (offset_T < local_end)], dim=-1)
        return AttentionBatch(run.rows_BN()[:, -num_queries:], None, page_BP, mask_BQK)
