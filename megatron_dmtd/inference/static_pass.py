"""A pass in one of a few shapes, so that a device can record it once and replay it: decoding steps, one token per request.

Chunks are padded to a power of two, and so is the number of pages that each reads. Every row writes: those whose K and V are not
kept to a scratch page of their slot, where the other rows of a shadow block read them during the layer. Rows that fill up a
shape belong to one more slot, which no request has. All that changes from step to step stands in `numbers_NBr` and in the page
tables, whose addresses stay; everything else is computed from them on the device.

Shape legend: N columns, B chunks, r rows of a chunk, R rows, S slots, P pages of the longest request, n pages read, T entries per
page, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dmtd.inference.passes import BlockTables, Group, runs_of
from megatron_dmtd.inference.planner import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """What a recording is for."""

    num_chunks: int
    rows_per_chunk: int
    final_per_chunk: int
    """Rows at the end of each chunk that leave the last layer."""
    num_pages: int
    """Pages that every chunk reads."""
    has_local: bool
    """Whether rows also read the scratch page of their slot."""


def padded(count: int, limit: int) -> int:
    """The next power of two, at most `limit`."""
    assert 1 <= count <= limit, (count, limit)
    return min(limit, 1 << (count - 1).bit_length())


class StaticPass:
    """Rows on their way through the layers of one half; the same questions as `Pass` answers."""

    def __init__(self, shape: StaticShape, tables: BlockTables, *, first_scratch_page: int, page_size: int) -> None:
        self.shape, self.tables = shape, tables
        self.first_scratch_page, self.page_size = first_scratch_page, page_size
        self.unused_slot = len(tables.page_SP) - 1
        self.final = range(shape.num_chunks * shape.final_per_chunk)
        # token, position, slot, history length, number of local rows read, whether K and V are kept
        self._blank = (0, 0, self.unused_slot, 1, 0, 0)
        size = (len(self._blank), shape.num_chunks, shape.rows_per_chunk)
        self.numbers_NBr = torch.zeros(size, dtype=torch.int64, device=tables.page_SP.device)

    def fill(self, rows: Rows, slots: Sequence[int]) -> None:
        """Take the rows of a step, given each one's slot. Chunks with too few are filled up at their beginning."""
        shape = self.shape
        table: list[tuple[int, ...]] = []
        for start, stop in runs_of(rows.chunk):
            table += [self._blank] * (shape.rows_per_chunk - (stop - start))
            for row in range(start, stop):
                local_length = rows.local_end[row] - rows.local_begin[row]
                numbers = rows.token_id[row], rows.position[row], slots[row], rows.history_length[row]
                table.append((*numbers, local_length, int(rows.is_written[row])))
        table += [self._blank] * (shape.num_chunks * shape.rows_per_chunk - len(table))
        host = torch.tensor(table, dtype=torch.int64).view(shape.num_chunks, shape.rows_per_chunk, -1)
        self.numbers_NBr.copy_(host.permute(2, 0, 1))

    def begin(self) -> None:
        """Forget what was computed from the numbers of an earlier step."""
        for name in ("written", "groups", "final_groups", "final_F"):
            self.__dict__.pop(name, None)

    @property
    def token_id_R(self) -> torch.Tensor:
        """Ids to embed."""
        return self.numbers_NBr[0].flatten()

    @property
    def position_R(self) -> torch.Tensor:
        """Positions, for rotary angles and for the entries written."""
        return self.numbers_NBr[1].flatten()

    @property
    def slot_R(self) -> torch.Tensor:
        """Slots of the rows."""
        return self.numbers_NBr[2].flatten()

    @property
    def slot_B(self) -> torch.Tensor:
        """Slots of the chunks; rows that fill one up come first."""
        return self.numbers_NBr[2, :, -1]

    @property
    def ends_early(self) -> bool:
        """Whether some rows do not leave the last layer."""
        return self.shape.final_per_chunk < self.shape.rows_per_chunk

    @cached_property
    def final_F(self) -> torch.Tensor:
        """Rows that leave the last layer, as an index."""
        return self._rows_Br()[:, -self.shape.final_per_chunk :].flatten()

    @cached_property
    def written(self) -> tuple[slice, torch.Tensor, torch.Tensor]:
        """`(row, page, entry in the page)`: every row, wherever it writes. Local rows lie in the order of their positions."""
        is_kept_R = self.numbers_NBr[5].flatten().bool()
        own_page_R = self.tables.page_SP[self.slot_R, torch.div(self.position_R, self.page_size, rounding_mode="floor")]
        page_R = torch.where(is_kept_R, own_page_R, self.first_scratch_page + self.slot_R)
        row_in_block_R = (self._rows_Br() % self.shape.rows_per_chunk - self._first_local_row).clamp(min=0).flatten()
        return slice(None), page_R, torch.where(is_kept_R, self.position_R.remainder(self.page_size), row_in_block_R)

    @cached_property
    def groups(self) -> list[Group]:
        """Attention of all rows."""
        return [self._group(self.shape.rows_per_chunk)]

    @cached_property
    def final_groups(self) -> list[Group]:
        """Attention of the final rows alone; `query_Br` still counts all rows."""
        return [self._group(self.shape.final_per_chunk)]

    @property
    def _first_local_row(self) -> int:
        return self.shape.rows_per_chunk - self.shape.final_per_chunk

    def _rows_Br(self) -> torch.Tensor:
        shape = self.shape
        return torch.arange(shape.num_chunks * shape.rows_per_chunk, device=self.numbers_NBr.device).view(shape.num_chunks, -1)

    def _group(self, num_queries: int) -> Group:
        shape, device = self.shape, self.numbers_NBr.device
        history_Br1, local_Br1 = (self.numbers_NBr[column, :, -num_queries:, None] for column in (3, 4))
        page_Bn = self.tables.page_SP[self.slot_B, : shape.num_pages]
        mask_BrK = torch.arange(shape.num_pages * self.page_size, device=device) < history_Br1
        if shape.has_local:
            page_Bn = torch.cat([page_Bn, self.first_scratch_page + self.slot_B[:, None]], dim=1)
            mask_BrK = torch.cat([mask_BrK, torch.arange(self.page_size, device=device) < local_Br1], dim=-1)
        return Group(self._rows_Br()[:, -num_queries:], None, page_Bn, mask_BrK)
