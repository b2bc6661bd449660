"""The loss of a step, whole and per phase of the cycle, from sums that can be added over microbatches, steps and ranks.

A mean of means is wrong as soon as two microbatches or ranks hold different numbers of targets; so this module keeps sums of
loss and counts of targets, and divides once, when asked for values. It does not communicate: the caller adds up `sums`.

Shape legend: B rows, N slots of a row, C phases of the cycle.
"""

from __future__ import annotations

import torch

from megatron_dmtd.cycle import phase


class PhaseLoss:
    """Sums of loss and counts of targets per phase of the cycle.

    At phase 0 the shadow knows the current token, at later phases only how far back the head lies: the spread of the per-phase
    losses shows how well look-ahead works.
    """

    def __init__(self, cycle_length: int, *, device: torch.device | str = "cpu") -> None:
        assert cycle_length >= 1, cycle_length
        self.cycle_length = cycle_length
        self.sums_2C = torch.zeros(2, cycle_length, dtype=torch.float64, device=device)
        """Row 0: sum of the loss; row 1: targets. float64, so that counts stay exact; add it up over ranks to reduce."""

    @torch.no_grad()
    def add(self, *, loss_BN: torch.Tensor, loss_mask_BN: torch.Tensor, positions_BN: torch.Tensor) -> None:
        """Add a microbatch: the unmasked loss of each slot (nats), the mask of real targets, and positions in the document."""
        shapes = (loss_BN.shape, loss_mask_BN.shape, positions_BN.shape)
        assert len(set(shapes)) == 1, shapes
        mask_BN = loss_mask_BN.double()
        masked_loss_BN = loss_BN.double() * mask_BN
        phase_BN = phase(positions_BN, self.cycle_length)
        # One sum per phase and no scatter: the same bits in every run on a GPU.
        for index in range(self.cycle_length):
            in_phase_BN = phase_BN == index
            self.sums_2C[0, index] += masked_loss_BN.where(in_phase_BN, 0.0).sum()
            self.sums_2C[1, index] += mask_BN.where(in_phase_BN, 0.0).sum()

    @property
    def sums(self) -> torch.Tensor:
        """`sums_2C`: what is added up over microbatches, ranks and steps."""
        return self.sums_2C

    @property
    def num_targets(self) -> int:
        """Targets counted so far, over all phases."""
        return int(self.sums_2C[1].sum().item())

    def values(self, *, prefix: str = "") -> dict[str, float]:
        """`loss` (nats per target) and `loss_phase_<i>`, each name after `prefix`; what has no target is left out."""
        loss_C, count_C = self.sums_2C.cpu()
        count = count_C.sum().item()
        if count == 0:
            return {}
        values = {f"{prefix}loss": loss_C.sum().item() / count}
        for index in range(self.cycle_length):
            if count_C[index] > 0:
                values[f"{prefix}loss_phase_{index}"] = (loss_C[index] / count_C[index]).item()
        return values
