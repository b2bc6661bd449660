"""Attention in C against its definition in float64, and against itself: rows apart and together, on one thread and on several.

Levels: fp32 sums against float64; bitwise between divisions of the same work.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from megatron_dmtd.inference.native.build import load_kernels


@dataclass
class Case:
    """Rows of two requests over random pages: ranges of entries and of rows, some of them empty."""

    heads: int
    groups: int
    width: int
    page_size: int
    lengths: tuple[int, int]
    """Entries of each request."""
    rows: tuple[int, int]
    """Rows of each request."""
    window: int | None = None
    is_view: bool = False
    """Whether the second request's rows read a view: entries in any order, some hidden; their ranges are of positions."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.heads)
        num_pages = -(-max(self.lengths) // self.page_size)
        self.page_SP = torch.randperm(2 * num_pages, generator=generator).view(2, num_pages)
        size = (2 * num_pages, self.groups, self.width, self.page_size)
        self.k_PGDT, self.v_PGTD = torch.randn(size, generator=generator), torch.randn(size, generator=generator).transpose(2, 3)
        self.v_PGTD = self.v_PGTD.contiguous()
        self.slot = [0] * self.rows[0] + [1] * self.rows[1]
        self.qkv = torch.randn(len(self.slot), (self.heads + 2 * self.groups) * self.width, generator=generator)
        self.ranges = []
        for slot, count in enumerate(self.rows):
            first = slot * self.rows[0]
            for index in range(count):
                end = max(0, self.lengths[slot] - count + index + 1)
                begin = 0 if self.window is None else max(0, end - self.window)
                block = first + index // 4 * 4
                local = (block, min(block + 4, first + count)) if index % 8 < 4 or end == 0 else (0, 0)
                self.ranges.append((begin, end, *local))
        num_entries = num_pages * self.page_size
        self.positions_VK = torch.full((1, num_entries), -1, dtype=torch.int32)
        shown = torch.randperm(num_entries, generator=generator)[: self.lengths[1]]
        shown = shown[(shown < num_entries // 3) | (shown > num_entries // 2)]  # whole vectors in the middle show nothing
        self.positions_VK[0, shown] = torch.randperm(self.lengths[1], generator=generator)[: len(shown)].int()

    def attend(self, queries: list[int]) -> torch.Tensor:
        columns = [torch.tensor(column) for column in (self.slot, *zip(*self.ranges))]
        query_row, row_start = torch.tensor(queries), torch.tensor([0, self.rows[0], sum(self.rows)])
        query_start = torch.tensor([0, sum(row < self.rows[0] for row in queries), len(queries)])
        out = torch.full((len(queries), self.heads * self.width), torch.nan)
        load_kernels().dmtd_attend(
            self.qkv.data_ptr(),
            self.qkv.shape[1],
            *(one.data_ptr() for one in (self.k_PGDT, self.v_PGTD, self.page_SP)),
            self.page_SP.shape[1],
            *(column.data_ptr() for column in columns),
            *(one.data_ptr() for one in (query_row, query_start, row_start)),
            2,
            out.data_ptr(),
            *(self.heads, self.groups, self.width, self.page_size),
            *self._views(),
        )
        return out

    def _views(self) -> tuple[int | None, int | None, int]:
        if not self.is_view:
            return None, None, 0
        self._view_R = torch.tensor([-1] * self.rows[0] + [0] * self.rows[1])
        return self._view_R.data_ptr(), self.positions_VK.data_ptr(), self.positions_VK.shape[1]

    def expected(self, row: int) -> torch.Tensor:
        """One row by the definition."""
        q, k, v = (
            self.qkv[:, None].double().unflatten(-1, (-1, self.width)).flatten(1, 2).split([self.heads, *[self.groups] * 2], 1)
        )
        begin, end, local_begin, local_end = self.ranges[row]
        pages = self.page_SP[self.slot[row]]
        seen = torch.arange(begin, end)
        if self.is_view and self.slot[row] == 1:
            seen = ((self.positions_VK[0] >= begin) & (self.positions_VK[0] < end)).nonzero()[:, 0]
        keys = self.k_PGDT[pages].double().permute(1, 0, 3, 2).flatten(1, 2)[:, seen]
        values = self.v_PGTD[pages].double().permute(1, 0, 2, 3).flatten(1, 2)[:, seen]
        keys = torch.cat([keys, k[local_begin:local_end].transpose(0, 1)], dim=1).repeat_interleave(self.heads // self.groups, 0)
        values = torch.cat([values, v[local_begin:local_end].transpose(0, 1)], dim=1).repeat_interleave(
            self.heads // self.groups, 0
        )
        weights = ((keys @ q[row, :, :, None])[..., 0] / math.sqrt(self.width)).softmax(-1)
        return (weights[:, None] @ values).flatten()


CASES = {
    "a prompt in several blocks, and a short one": Case(6, 2, 48, 16, (70, 9), (41, 9)),
    "more than two segments, windows that end in others": Case(4, 4, 16, 32, (530, 300), (19, 3), window=261),
    "one row each, one key head, long": Case(5, 1, 32, 16, (600, 257), (1, 1)),
    "more heads to a key head than a block has queries": Case(40, 1, 16, 16, (20, 40), (3, 2)),
    "rows that read no entries": Case(2, 1, 16, 16, (3, 30), (8, 5)),
    "a view with holes": Case(6, 2, 48, 16, (70, 400), (41, 9), is_view=True),
    "a long view, one row": Case(4, 1, 32, 32, (30, 900), (3, 1), is_view=True),
    "a view through a window": Case(4, 2, 16, 16, (40, 600), (5, 30), window=90, is_view=True),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request) -> Case:
    return request.param


def test_attention_in_c_is_that_of_the_definition(case):
    found = case.attend(list(range(len(case.slot))))
    for row in range(len(case.slot)):
        torch.testing.assert_close(found[row].double(), case.expected(row), rtol=0, atol=3e-6)


def test_a_row_gets_the_same_bits_alone_with_others_and_on_more_threads(case):
    """With many threads and little work, segments of the same row are computed by several of them."""
    together = case.attend(list(range(len(case.slot))))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(16)
        assert torch.equal(case.attend(list(range(len(case.slot)))), together)
        assert torch.equal(case.attend([len(case.slot) - 1]), together[-1:])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(case.attend(list(range(1, len(case.slot), 2))), together[1::2])
    assert torch.equal(case.attend([0]), together[:1])
