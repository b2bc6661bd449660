"""Views and copies of a pass as tensors, and the rotation of what is copied.

Shape legend: R rows of a pass, S slots, P pages, B chunks, G key/value heads, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron_dmtd.architecture import AttentionSpec
from megatron_dmtd.architecture.rotary import attention_factor, rotary_tables
from megatron_dmtd.inference.cache_ops.pages import PageSet
from megatron_dmtd.inference.cache_ops.views import HIDDEN, Moves, View
from megatron_dmtd.inference.kv.codec import EncodedPages

#: Copies entries of a visit: page and offset of sources and of targets, cosines and sines [R, D] of the angles.
Move = Callable[["MovingVisit", tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]], None]


class MovingVisit(Protocol):
    """What a copy needs to know of a visit (`ops.protocol.LayerVisit`)."""

    @property
    def attention(self) -> AttentionSpec:
        """With the rotary profile of its keys."""

    @property
    def group(self) -> str:
        """The K/V group."""

    @property
    def pages(self) -> EncodedPages:
        """Its K and V."""


@dataclass(frozen=True, slots=True)
class NativeViews:
    """The same as arguments of native kernels."""

    table: tuple[int, int]
    """Address and columns of the pages of every slot and view."""
    rows: int
    """Address of the row of that table where each row of the pass finds its pages."""
    views: tuple[int, int, int]
    """Addresses of each row's view and of the positions of entries, and the number of entries."""


class PassViews:
    """What rows of requests with cache operations read, store and copy in one pass."""

    def __init__(
        self,
        views: Sequence[View],
        moves: Sequence[Moves],
        *,
        rows: Sequence[int],
        slots: Sequence[int],
        groups: Iterable[str],
        device: torch.device,
    ) -> None:
        """`rows`: of each row its view, or -1 for a plain one; `slots`: of each row its slot."""
        self.device = device
        self._views, self._moves = views, [one for one in moves if len(one.targets)]
        self._num_pages = max(len(view.pages) for view in views)
        self._tables = {name: self._table(name) for name in groups}
        self._extended: dict[str, torch.Tensor] = {}
        self._rows, self._slots = torch.tensor(rows), torch.tensor(slots)
        self.table_R = self._rows
        """The row of `pages` where each row of the pass finds its pages."""
        self._view_positions = self._positions()
        self._native_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._columns = {name: _columns(self._moves, name, device) for name in groups} if self._moves else {}
        self._rotations: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def select(self, kept: Sequence[int]) -> PassViews:
        """The same for some rows of the pass."""
        found = copy.copy(self)
        found._rows, found._slots = self._rows[list(kept)], self._slots[list(kept)]
        found.table_R, found._extended, found._native_rows = found._rows, {}, None
        return found

    def _table(self, group: str) -> torch.Tensor:
        """Pages [views, P] of every view; after its own, a view's last page is repeated."""
        rows = [[pages.tables[group].pages[0] for pages in view.pages] for view in self._views]
        return torch.tensor([row + row[-1:] * (self._num_pages - len(row)) for row in rows], device=self.device)

    def _positions(self) -> torch.Tensor:
        page_size = self._views[0].page_size
        positions = np.full((len(self._views), self._num_pages * page_size), HIDDEN)
        for row, view in zip(positions, self._views):
            row[: len(view.pages) * page_size] = view.position_K
        return torch.from_numpy(positions).to(self.device)

    def pages(self, group: str, page_SP: torch.Tensor) -> torch.Tensor:
        """The pages of every slot, and after them those of every view."""
        found = self._extended.get(group)
        if found is None:
            own = self._tables[group]
            width = max(own.shape[1], page_SP.shape[1])
            found = page_SP.new_zeros(page_SP.shape[0] + own.shape[0], width)
            found[: page_SP.shape[0], : page_SP.shape[1]] = page_SP
            found[page_SP.shape[0] :, : own.shape[1]] = own
            self._extended[group] = found
            self.table_R = torch.where(self._rows >= 0, self._rows + page_SP.shape[0], self._slots).to(self.device)
        return found

    def native(self, group: str, page_SP: torch.Tensor) -> NativeViews:
        """What native kernels are given, as addresses in memory that this object keeps."""
        table = self.pages(group, page_SP)
        if self._native_rows is None:
            positions = self._view_positions.to(torch.int32).contiguous()
            self._native_rows = self.table_R.contiguous(), self._rows.contiguous(), positions
        rows, views, positions = self._native_rows
        return NativeViews(
            table=(table.data_ptr(), table.shape[1]),
            rows=rows.data_ptr(),
            views=(views.data_ptr(), positions.data_ptr(), positions.shape[1]),
        )

    def read(self, group: str, views: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages `[B, P]` of some views, and the positions `[B, K]` of their entries."""
        chosen = torch.tensor(views, device=self.device)
        return self._tables[group][chosen], self._view_positions[chosen]

    def copy_moved(self, visit: MovingVisit, move: Move | None = None) -> None:
        """Copy what moves, with K rotated back and to its new position. `move`: does it instead of torch."""
        if not self._moves:
            return
        source, source_offset, target, target_offset, *_ = self._columns[visit.group]
        if move is not None:
            move(visit, self._columns[visit.group][:4], self._turns(visit))
            return
        k_RGD, v_RGD = visit.pages.read_entries(source, source_offset)
        visit.pages.write(target, target_offset, self._rotated(k_RGD, visit), v_RGD)

    def _turns(self, visit: MovingVisit, wide: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [R, D] of the angles between the positions."""
        profile, head_dim = visit.attention.rotary, visit.attention.head_dim
        key = (profile, head_dim)
        if key not in self._rotations:
            *_, before, after = self._columns[visit.group]
            cos, sin = rotary_tables(before, profile, head_dim, wide)
            next_cos, next_sin = rotary_tables(after, profile, head_dim, wide)
            squared = attention_factor(profile.scaling) ** 2  # on both tables, and already in K
            turn = (next_cos * cos + next_sin * sin) / squared, (next_sin * cos - next_cos * sin) / squared
            self._rotations[key] = turn[0].contiguous(), turn[1].contiguous()
        return self._rotations[key]

    def _rotated(self, k_RGD: torch.Tensor, visit: MovingVisit) -> torch.Tensor:
        wide = torch.promote_types(k_RGD.dtype, torch.float32)
        cos_R1D, sin_R1D = (turn[:, None] for turn in self._turns(visit, wide))
        k = k_RGD.to(wide)
        first, second = k.chunk(2, dim=-1)
        return (k * cos_R1D + torch.cat([-second, first], dim=-1) * sin_R1D).to(k_RGD.dtype)


def _columns(moves: Sequence[Moves], group: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Page and offset of all sources and of all targets, and the positions of both."""

    def pages(sets: Sequence[PageSet]) -> list[int]:
        return [one.tables[group].pages[0] for one in sets]

    columns = (
        np.concatenate([pages(one.sources) for one in moves]),
        np.concatenate([one.source_offset for one in moves]),
        np.concatenate([pages(one.targets) for one in moves]),
        np.concatenate([one.target_offset for one in moves]),
        np.concatenate([one.source_position for one in moves]),
        np.concatenate([one.target_position for one in moves]),
    )
    return tuple(torch.from_numpy(column).to(device) for column in columns)
