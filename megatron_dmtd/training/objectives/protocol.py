"""What an objective is: everything about a step that depends on what the run minimises.

The loop and the step know this protocol and no objective. An objective names the rows that it reads, makes microbatches of them,
calls the model, and gives the loss of a microbatch and the count by which the step's gradient is divided. It reports sums that
are added up over microbatches, ranks and steps; what it has to remember goes into each checkpoint.

The gradient of a step is that of `sum of loss / sum of count`, both over the whole global batch, whichever ranks and microbatches
hold the targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch

from megatron_dmtd.data.batches.rows import Row


class Microbatch(Protocol):
    """The rows of one forward pass of one rank."""

    def to(self, device: torch.device) -> Self:
        """The same rows on `device`."""
        ...


class LossSums(Protocol):
    """Sums of losses and counts of targets. Means are taken once, when values are asked for: a mean of means is wrong as soon as
    two microbatches hold different numbers of targets.
    """

    @property
    def sums(self) -> torch.Tensor:
        """Every sum, float64 so that counts are exact. Added up in place over microbatches, ranks and steps."""
        ...

    @property
    def num_targets(self) -> int:
        """Targets counted so far."""
        ...

    def values(self, *, prefix: str = "") -> dict[str, float]:
        """What the log shows, each name after `prefix`; `loss` is among it unless no target was counted."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchLoss:
    """The last stage's result for one microbatch."""

    loss: torch.Tensor
    """Scalar to differentiate: a sum over the targets."""
    count: torch.Tensor
    """Scalar, int32: the targets. The gradient of the step is divided by the sum of all counts."""
    sums: LossSums


BatchT = TypeVar("BatchT", bound=Microbatch)


class Objective(Protocol[BatchT]):
    """What a run minimises. Made once per rank, before the model; the same on every rank."""

    @property
    def row_type(self) -> type[Row]:
        """The type of the rows that it reads; others are refused."""
        ...

    def make_batch(self, rows: Sequence[Any]) -> BatchT:
        """One microbatch of rows of `row_type`, in order."""
        ...

    def forward(self, model: Any, batch: BatchT) -> torch.Tensor:
        """Call this rank's stage. The last stage's output goes to `loss`, that of the others to the next stage."""
        ...

    def loss(self, batch: BatchT, output: torch.Tensor) -> MicrobatchLoss:
        """Loss of a microbatch from the last stage's output."""
        ...

    def new_sums(self, *, device: torch.device | str) -> LossSums:
        """Empty sums."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it has to remember across restarts, as plain values; the same on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave before a restart. Not called for checkpoints written before objectives had states."""
        ...
