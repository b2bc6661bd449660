"""The interface of an attention backend: two calls over the streams of one microbatch.

A layer of the model carries one stream of B rows (sequential layers, vanilla models, the shadow stream of Norefresh) or two
(Refresh: real and shadow). A backend never sees weights and does not depend on Megatron. Its masks follow from `cycle.visible`
alone.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_dmtd.cycle.method import Method


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLayout:
    """Position and document of every slot of a microbatch; the same for every stream and layer."""

    positions_BN: torch.Tensor
    """Position of each slot in its document, int64. Every document starts at 0."""
    document_lengths: tuple[tuple[int, ...], ...]
    """Slots of each document of each row: whole cycles, and the sum of each row is N."""
    method: Method

    def __post_init__(self) -> None:
        rows, slots = self.positions_BN.shape
        assert len(self.document_lengths) == rows, (len(self.document_lengths), rows)
        assert all(sum(row) == slots for row in self.document_lengths), (self.document_lengths, slots)

    @property
    def documents_BN(self) -> torch.Tensor:
        """Index of each slot's document in its row, int64."""
        return (self.positions_BN == 0).cumsum(dim=1) - 1

    @property
    def rows_are_alike(self) -> bool:
        """Whether every row holds documents of the same lengths."""
        return len(set(self.document_lengths)) == 1

    def part(self, rows: slice, slots: slice, document_lengths: tuple[int, ...]) -> StreamLayout:
        """The layout of some rows, in which `slots` hold whole documents of these lengths."""
        positions_BN = self.positions_BN[rows, slots]
        return replace(self, positions_BN=positions_BN, document_lengths=(document_lengths,) * positions_BN.shape[0])


class AttentionBackend(Protocol):
    """Attention over one microbatch. Made per microbatch, so that its masks live as long as the backward pass needs them.

    `window` is the layer's: keys that a query sees at most, itself included, counted in positions; None: all that the rule shows.
    """

    def real(
        self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor, *, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention of real slots to real slots of the same document; [B, H, N, D]."""
        ...

    def shadow(
        self,
        q_BHND: torch.Tensor,
        k_BGND: torch.Tensor,
        v_BGND: torch.Tensor,
        real_k_BGND: torch.Tensor | None,
        real_v_BGND: torch.Tensor | None,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attention of shadow slots to shadow slots, and to the real slots of earlier cycles if the method has any."""
        ...
