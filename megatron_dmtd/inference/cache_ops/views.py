"""What the rows of a step read when cache operations have been at work: views of pages, and copies to be made. Numbers only.

A view is what the queries of one segment see of one request: page sets in any order, and for every entry the position at which
it holds an active token, or -1. So a row sees the entries whose positions lie in a range, whatever lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dmtd.inference.cache_ops.pages import PageSet
from megatron_dmtd.inference.cache_ops.program import Indices

HIDDEN = -1


class View:
    """Page sets and the positions of their entries."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.pages = page_size, list[PageSet]()
        self._number: dict[PageSet, int] = {}
        self._positions = np.full(4 * page_size, HIDDEN)

    @property
    def position_K(self) -> Indices:
        """Of each entry the position of the token that it holds; `HIDDEN` if it is not seen."""
        return self._positions[: len(self.pages) * self.page_size]

    def add(self, pages: PageSet, offsets: Indices, positions: Indices) -> None:
        """Show entries of a page set."""
        number = self._number.setdefault(pages, len(self.pages))
        if number == len(self.pages):
            self.pages.append(pages)
            if len(self._positions) < len(self.pages) * self.page_size:
                self._positions = np.concatenate([self._positions, np.full_like(self._positions, HIDDEN)])
        self._positions[number * self.page_size + offsets] = positions

    def entry(self, pages: PageSet, offset: int) -> int:
        """The number of an entry."""
        return self._number[pages] * self.page_size + offset


@dataclass(frozen=True, slots=True)
class Moves:
    """Entries to be copied to other entries, with K rotated, once K and V of the pass are stored. Columns of equal length."""

    sources: Sequence[PageSet]
    source_offset: Indices
    source_position: Indices
    targets: Sequence[PageSet]
    target_offset: Indices
    target_position: Indices


@dataclass(slots=True)
class Part:
    """A chunk's rows of one segment."""

    view: View
    refreshed: list[int] = field(default_factory=list)
    """Heads of cycles whose real K and V are computed."""
    blocks: list[int] = field(default_factory=list)
    """Heads of cycles whose shadow block is computed."""
    tokens: list[int] = field(default_factory=list)
    """Raw tokens that go through the sequential layers."""


@dataclass(frozen=True, slots=True)
class EditedChunk:
    """How a chunk of a request with cache operations is computed."""

    parts: Sequence[Part]
    moves: Sequence[Moves]
    birth: Indices
    """Position of each raw token."""
    places: dict[int, tuple[PageSet, int]]
    """Where the first token of each computed cycle is stored."""
