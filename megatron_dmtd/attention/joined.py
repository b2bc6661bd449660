"""What masked, flex and te share: real and shadow keys concatenated along the sequence, and one kernel that takes a mask.

Shape legend: B rows, N slots of a row, H query heads, G key/value heads, D head width, K keys (N for each stream that is read).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from megatron_dmtd.attention.protocol import StreamLayout

MaskT = TypeVar("MaskT")


class JoinedKeysAttention(ABC, Generic[MaskT]):
    """See `protocol.AttentionBackend`. A subclass supplies the two masks and the kernel."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout
        self._masks: dict[tuple[str, int | None], MaskT] = {}

    @abstractmethod
    def make_real_mask(self, window: int | None) -> MaskT:
        """Causal inside each document: N queries, N keys."""

    @abstractmethod
    def make_shadow_mask(self, window: int | None) -> MaskT:
        """The variant's rule: N shadow queries, K keys."""

    @abstractmethod
    def attend(self, q_BHND: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask: MaskT) -> torch.Tensor:
        """Attention under a mask; [B, H, N, D]."""

    def real(
        self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor, *, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention inside each document."""
        return self.attend(q_BHND, k_BGND, v_BGND, self._mask("real", self.make_real_mask, window))

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
        """Shadow queries: by the rule of the variant."""
        mask = self._mask("shadow", self.make_shadow_mask, window)
        if real_k_BGND is None or real_v_BGND is None:
            assert self.layout.method.streams == ("shadow",), "this method has a real stream, which shadow queries read"
            return self.attend(q_BHND, k_BGND, v_BGND, mask)
        k_BGKD, v_BGKD = torch.cat((real_k_BGND, k_BGND), dim=2), torch.cat((real_v_BGND, v_BGND), dim=2)
        return self.attend(q_BHND, k_BGKD, v_BGKD, mask)

    def _mask(self, name: str, make: Callable[[int | None], MaskT], window: int | None) -> MaskT:
        """A mask, made once for all layers of the microbatch that have this window."""
        if (name, window) not in self._masks:
            self._masks[name, window] = make(window)
        return self._masks[name, window]
