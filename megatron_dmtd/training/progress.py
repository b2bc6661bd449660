"""What the loop remembers from step to step in addition to model and optimizer. It is part of each checkpoint, so that the log of
a resumed run is, line for line, that of a run that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dmtd.training.objectives import LossSums, Objective


@dataclass(kw_only=True, slots=True)
class Progress:
    """The same on every rank."""

    since_log: LossSums
    """Losses since the last log line."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps, oldest first, with which a spike is compared."""
    bad_steps: int = 0
    """Steps skipped so far because their loss or gradient was not finite."""
    steps_without_targets: int = 0
    """Steps so far whose rows had nothing to predict."""
    without_targets_in_a_row: int = 0
    """How many of them end at the last step."""
    evaluation_due: bool = False
    """Whether the run stopped before the evaluation of its last step was finished."""
    corpus: list[int] = field(default_factory=list)
    """Rows and targets per epoch of the training corpora, which identify them; empty before they are known."""

    unlogged: list[dict[str, Any]] = field(default_factory=list)
    """Log lines up to this step that could not be written: the next attempt writes them."""

    @classmethod
    def new(cls, objective: Objective[Any], *, device: torch.device | str = "cpu") -> Progress:
        """The progress of a run that has not begun."""
        return cls(since_log=objective.new_sums(device=device))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "since_log": self.since_log.sums.tolist(),
            "recent_losses": list(self.recent_losses),
            "bad_steps": self.bad_steps,
            "steps_without_targets": self.steps_without_targets,
            "without_targets_in_a_row": self.without_targets_in_a_row,
            "evaluation_due": self.evaluation_due,
            "corpus": list(self.corpus),
            "unlogged": [dict(record) for record in self.unlogged],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], objective: Objective[Any], *, device: torch.device | str = "cpu") -> Progress:
        """The progress that `to_dict` described, bit for bit."""
        progress = cls.new(objective, device=device)
        progress.since_log.sums.add_(torch.tensor(values["since_log"], dtype=torch.float64, device=device))
        progress.recent_losses = list(values["recent_losses"])
        progress.bad_steps = values["bad_steps"]
        progress.steps_without_targets = values.get("steps_without_targets", 0)
        progress.without_targets_in_a_row = values.get("without_targets_in_a_row", 0)
        progress.evaluation_due = values["evaluation_due"]
        progress.corpus = list(values["corpus"])
        progress.unlogged = [dict(record) for record in values.get("unlogged", [])]
        return progress
