"""One batch of packed documents, as the training step takes it.

Shape legend: B rows, N slots of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed rows. Every document, or piece of one, starts at position 0 and fills whole cycles; nothing crosses its end."""

    tokens_BN: torch.Tensor
    """Input ids, int64. Slots that only complete a document's last cycle, or the row, hold the pad id."""
    labels_BN: torch.Tensor
    """The id to predict at each slot, int64; the pad id where `loss_mask_BN` is 0."""
    loss_mask_BN: torch.Tensor
    """1.0 where the label is a real target, 0.0 elsewhere, float32. It depends on positions, never on the value of a token."""
    positions_BN: torch.Tensor
    """Position of each slot in its document, int64, from 0."""
    document_lengths: tuple[tuple[int, ...], ...]
    """Slots of each document of each row, in order: whole cycles, and the sum of each row is N."""

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        return Batch(
            tokens_BN=self.tokens_BN.to(device, non_blocking=True),
            labels_BN=self.labels_BN.to(device, non_blocking=True),
            loss_mask_BN=self.loss_mask_BN.to(device, non_blocking=True),
            positions_BN=self.positions_BN.to(device, non_blocking=True),
            document_lengths=self.document_lengths,
        )
