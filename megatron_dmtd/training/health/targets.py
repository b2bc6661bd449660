"""Steps without a single target: they teach nothing, and the weights still move. Each run of them is announced and counted."""

from __future__ import annotations

from megatron_dmtd.config import OptimizerConfig
from megatron_dmtd.training.progress import Progress


def count(progress: Progress, *, num_targets: int, step: int, lr: float, optimizer: OptimizerConfig) -> str:
    """Count a step with so many targets, over all ranks. The message that is due, or an empty string.

    A run of steps without targets is announced when it has 1, 2, 4, 8, ... steps, and when it ends.
    """
    if num_targets > 0:
        ended, progress.without_targets_in_a_row = progress.without_targets_in_a_row, 0
        return f"step {step} has targets again, after {ended} steps without" if ended else ""
    progress.steps_without_targets += 1
    progress.without_targets_in_a_row += 1
    in_a_row = progress.without_targets_in_a_row
    if in_a_row & (in_a_row - 1):
        return ""
    return (
        f"step {step}: no row of the step has a target: {in_a_row} such steps in a row, {progress.steps_without_targets} in all. "
        f"Their gradient is zero, so nothing is learnt; the weights still move by {_movement(optimizer, lr)}. "
        "`preprocess.py rows` shows which tokens of the corpus are targets"
    )


def _movement(optimizer: OptimizerConfig, lr: float) -> str:
    momentum = "what is left of Adam's momentum"
    if optimizer.weight_decay == 0.0:
        return momentum
    return f"{momentum} and by weight decay, which shrinks them by lr x weight_decay = {lr * optimizer.weight_decay:.2g} per step"


def summary(progress: Progress, *, steps: int) -> str:
    """The last word about them when a run ends; an empty string if every step had targets."""
    if not progress.steps_without_targets:
        return ""
    return f"{progress.steps_without_targets} of {steps} steps had no targets, and nothing was learnt in them"
