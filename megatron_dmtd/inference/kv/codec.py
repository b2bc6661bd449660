"""Formats of K and V in memory. All writing and reading goes through a codec, so that another format is one file.

Shape legend: P pages, T entries per page, G key/value heads, D head width, R rows written, B requests, K = P T keys read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PageShape:
    """What one page holds of one visit."""

    page_size: int
    """Entries."""
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class NativePages:
    """Addresses of fp32 pages, for kernels that read them in place: K as `[P, G, D, T]`, V as `[P, G, T, D]`."""

    k: int
    v: int


class EncodedPages(Protocol):
    """K and V of one visit in all pages of its group."""

    def write(self, page_R: torch.Tensor, offset_R: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> None:
        """Store one entry for each row, at `offset` of `page`."""

    def read(self, page_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[B, G, K, D]` of whole pages, in the type that attention computes with."""

    def read_entries(self, page_R: torch.Tensor, offset_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[R, G, D]` of single entries."""

    @property
    def native(self) -> NativePages:
        """Where native kernels find the pages. Only for formats that they know."""


class Codec(Protocol):
    """A format of K and V."""

    def page_bytes(self, shape: PageShape) -> int:
        """Memory of one page of one visit."""

    def allocate(self, shape: PageShape, *, num_pages: int, device: torch.device) -> EncodedPages:
        """Pages filled with zeros: what a mask hides must not be NaN."""


class PlainPages:
    """Numbers as they are."""

    def __init__(self, shape: PageShape, *, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (num_pages, shape.num_key_value_heads, shape.page_size, shape.head_dim)
        self.v_PGTD = torch.zeros(size, dtype=dtype, device=device)
        if device.type == "cpu":
            # Entries of a key dimension are adjacent: the scores of a page are then sums of whole vectors.
            self.k_PGDT = torch.zeros((*size[:2], shape.head_dim, shape.page_size), dtype=dtype)
        else:
            # The layout of values: pages are then gathered in one copy.
            self.k_PGDT = torch.zeros_like(self.v_PGTD).transpose(-2, -1)

    def write(self, page_R: torch.Tensor, offset_R: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> None:
        """See `EncodedPages`."""
        self.k_PGDT[page_R, :, :, offset_R] = k_RGD
        self.v_PGTD[page_R, :, offset_R] = v_RGD

    def read(self, page_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EncodedPages`."""
        return _gathered(self.k_PGDT.transpose(-2, -1), page_BP), _gathered(self.v_PGTD, page_BP)

    def read_entries(self, page_R: torch.Tensor, offset_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EncodedPages`."""
        return self.k_PGDT[page_R, :, :, offset_R], self.v_PGTD[page_R, :, offset_R]

    @cached_property
    def native(self) -> NativePages:
        """See `EncodedPages`."""
        assert self.v_PGTD.dtype == torch.float32 and self.k_PGDT.is_contiguous(), self.v_PGTD.dtype
        return NativePages(self.k_PGDT.data_ptr(), self.v_PGTD.data_ptr())


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """K and V in the type of activations."""

    dtype: torch.dtype

    def page_bytes(self, shape: PageShape) -> int:
        """See `Codec`."""
        return 2 * shape.page_size * shape.num_key_value_heads * shape.head_dim * self.dtype.itemsize

    def allocate(self, shape: PageShape, *, num_pages: int, device: torch.device) -> PlainPages:
        """See `Codec`."""
        return PlainPages(shape, num_pages=num_pages, dtype=self.dtype, device=device)


def _gathered(pages_PGTD: torch.Tensor, page_BP: torch.Tensor) -> torch.Tensor:
    """Entries `[B, G, K, D]` of pages, gathered key head by key head so that one copy makes them contiguous."""
    num_key_value_heads = pages_PGTD.shape[1]
    index_BGP = page_BP[:, None] * num_key_value_heads + torch.arange(num_key_value_heads, device=page_BP.device)[:, None]
    return pages_PGTD.flatten(0, 1)[index_BGP].flatten(2, 3)
