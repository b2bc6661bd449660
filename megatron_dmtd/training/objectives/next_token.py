"""Pretraining: cross-entropy of the next token over packed documents, reported whole and per phase of the cycle.

Shape legend: B rows, N slots of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_dmtd.config import Config
from megatron_dmtd.data.batches.batch import Batch
from megatron_dmtd.data.batches.loader import collate
from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.training.metrics import PhaseLoss
from megatron_dmtd.training.objectives.protocol import MicrobatchLoss


class NextToken:
    """The loss of a step is the mean over all targets of the global batch."""

    row_type = Row

    def __init__(self, config: Config) -> None:
        self._cycle_length = config.cycle.cycle_length

    def make_batch(self, rows: Sequence[Row]) -> Batch:
        """Packed documents, in order."""
        return collate(rows)

    def forward(self, model: Any, batch: Batch) -> torch.Tensor:
        """On the last stage: the loss of each slot, in nats."""
        output: torch.Tensor = model(
            batch.tokens_BN, batch.positions_BN, batch.labels_BN, document_lengths=batch.document_lengths
        )
        return output

    def loss(self, batch: Batch, output: torch.Tensor) -> MicrobatchLoss:
        """Sums over the slots with a target."""
        sums = self.new_sums(device=output.device)
        sums.add(loss_BN=output.detach(), loss_mask_BN=batch.loss_mask_BN, positions_BN=batch.positions_BN)
        loss_BN = output.float()
        return MicrobatchLoss(loss=(loss_BN * batch.loss_mask_BN).sum(), count=batch.loss_mask_BN.sum().to(torch.int), sums=sums)

    def new_sums(self, *, device: torch.device | str) -> PhaseLoss:
        """Sums per phase of the cycle."""
        return PhaseLoss(self._cycle_length, device=device)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: rows are identified by their numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
