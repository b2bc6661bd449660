"""The two caches of decoding: P for the parallel layers, S for the sequential ones, each paged and each with its own law.

P holds real K and V (Refresh) or shadow K and V (Norefresh), never both; S holds those of every real token, never a MASK. Which
entries hold what is the planner's business; this file stores, and knows which pages are whose.

Shape legend: L layers, N pages, G key/value heads, T entries per page, E head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_dmtd.inference.kv.pages import PagePool, PageTable


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """Size of one pool's tensors."""

    num_layers: int
    num_pages: int
    num_key_value_heads: int
    page_size: int
    head_dim: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one page: K and V of all layers."""
        return 2 * self.num_layers * self.num_key_value_heads * self.page_size * self.head_dim * dtype.itemsize


class KeyValuePool:
    """K and V of one half, and the owners of their pages."""

    def __init__(
        self, shape: PoolShape, *, name: str, dtype: torch.dtype, device: torch.device, num_scratch_pages: int = 0
    ) -> None:
        """`num_scratch_pages` more pages stand after those of `shape`; they are nobody's, and hold nothing between steps."""
        self.shape = shape
        self.pages = PagePool(num_pages=shape.num_pages, page_size=shape.page_size, name=name)
        pages = (shape.num_layers, shape.num_pages + num_scratch_pages, shape.num_key_value_heads)
        # Zeros: what a mask hides must not be NaN.
        self.v_LNGTE = torch.zeros((*pages, shape.page_size, shape.head_dim), dtype=dtype, device=device)
        if device.type == "cpu":
            # Keys lie entry beside entry: scores of a page are then sums of whole vectors.
            self.k_LNGET = torch.zeros((*pages, shape.head_dim, shape.page_size), dtype=dtype)
        else:
            # As values do: pages are then gathered in one copy.
            self.k_LNGET = torch.zeros_like(self.v_LNGTE).transpose(-2, -1)

    def layer_pointers(self, layer: int) -> tuple[int, int]:
        """Addresses of K and V of one layer."""
        layer_bytes = self.k_LNGET.stride(0) * self.k_LNGET.itemsize
        return self.k_LNGET.data_ptr() + layer * layer_bytes, self.v_LNGTE.data_ptr() + layer * layer_bytes


@dataclass(slots=True)
class Tables:
    """A request's pages in both pools."""

    parallel: PageTable
    sequential: PageTable

    @classmethod
    def empty(cls) -> Tables:
        """No pages."""
        return cls(PageTable(), PageTable())


class Pools:
    """Both pools, asked and returned together, so that no request holds half of what it needs."""

    def __init__(self, parallel: KeyValuePool, sequential: KeyValuePool) -> None:
        self.parallel, self.sequential = parallel, sequential

    def _both(self, tables: Tables) -> tuple[tuple[PagePool, PageTable], tuple[PagePool, PageTable]]:
        return (self.parallel.pages, tables.parallel), (self.sequential.pages, tables.sequential)

    def can_ever_hold(self, num_parallel: int, num_sequential: int) -> bool:
        """Whether a request of that size fits when it is alone."""
        return (
            self.parallel.pages.pages_for(num_parallel) <= self.parallel.shape.num_pages
            and self.sequential.pages.pages_for(num_sequential) <= self.sequential.shape.num_pages
        )

    def missing(self, tables: Tables, num_parallel: int, num_sequential: int) -> tuple[int, int]:
        """Pages that `tables` lacks to hold that many entries: in P, in S."""
        (p_pool, p_table), (s_pool, s_table) = self._both(tables)
        return p_pool.missing(p_table, num_parallel), s_pool.missing(s_table, num_sequential)

    def has_free(self, num_parallel_pages: int, num_sequential_pages: int) -> bool:
        """Whether that many pages are free in P and in S."""
        return num_parallel_pages <= self.parallel.pages.num_free and num_sequential_pages <= self.sequential.pages.num_free

    def grow(self, tables: Tables, num_parallel: int, num_sequential: int) -> None:
        """Give `tables` the pages that it lacks, in both pools."""
        for (pool, table), entries in zip(self._both(tables), (num_parallel, num_sequential)):
            pool.grow(table, entries)

    def release(self, tables: Tables) -> None:
        """Return every page of `tables`."""
        for pool, table in self._both(tables):
            pool.release_table(table)

    def check_integrity(self, tables: Iterable[Tables]) -> None:
        """Both pools' laws, given everything that owns pages."""
        owned = list(tables)
        self.parallel.pages.check_integrity(table.parallel.pages for table in owned)
        self.sequential.pages.check_integrity(table.sequential.pages for table in owned)
