"""What masked, flex and te share: real and shadow keys concatenated along the sequence, and one kernel that takes a mask.

Shape legend: B rows, N slots per row, H query heads, G key-value heads, D head width, K keys (N, or 2N for Refresh shadows).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from megatron_dmtd.attention.protocol import StreamLayout


class JoinedKeysAttention(ABC):
    """See `protocol.AttentionBackend`. A subclass supplies the two masks and the kernel."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout

    @property
    @abstractmethod
    def real_mask(self) -> Any:
        """Causal inside each document: N queries, N keys. Made once."""

    @property
    @abstractmethod
    def shadow_mask(self) -> Any:
        """The variant's rule: N shadow queries, K keys. Made once."""

    @abstractmethod
    def attend(self, q_BHND: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask: Any) -> torch.Tensor:
        """Attention under a mask; [B, H, N, D]."""

    def real(self, q_BHND: torch.Tensor, k_BGND: torch.Tensor, v_BGND: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each document."""
        return self.attend(q_BHND, k_BGND, v_BGND, self.real_mask)

    def shadow(
        self,
        q_BHND: torch.Tensor,
        k_BGND: torch.Tensor,
        v_BGND: torch.Tensor,
        real_k_BGND: torch.Tensor | None,
        real_v_BGND: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shadow queries: by the rule of the variant."""
        if self.layout.history == "shadow":
            return self.attend(q_BHND, k_BGND, v_BGND, self.shadow_mask)
        assert real_k_BGND is not None and real_v_BGND is not None, "Refresh reads the real stream"
        k_BGKD, v_BGKD = torch.cat((real_k_BGND, k_BGND), dim=2), torch.cat((real_v_BGND, v_BGND), dim=2)
        return self.attend(q_BHND, k_BGKD, v_BGKD, self.shadow_mask)
