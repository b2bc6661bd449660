"""Rows of each optimizer step: constant, or ramped up from fewer (`training.rampup_batch_size`).

The semantics are those of Megatron's `rampup_batch_size START INCREMENT SAMPLES`, in exact integers: the batch grows from START
to `global_batch_size` in equal increments, each after an equal part of the first SAMPLES rows. The size of a step depends only on
the rows consumed before it, so a run resumed at any step, in any layout, gets the same batches.
"""

from __future__ import annotations

from megatron_dmtd.config.sections import TrainingConfig


def batch_size(training: TrainingConfig, rows: int) -> int:
    """Rows of the step that follows `rows` consumed rows."""
    if not training.rampup_batch_size:
        return training.global_batch_size
    start, increment, samples = training.rampup_batch_size
    if rows >= samples:
        return training.global_batch_size
    return start + rows * _num_increments(training) // samples * increment


def batch_sizes(training: TrainingConfig) -> range:
    """All sizes that a step can have, in ascending order."""
    full = training.global_batch_size
    if not training.rampup_batch_size:
        return range(full, full + 1)
    start, increment, _ = training.rampup_batch_size
    return range(start, full + 1, increment)


def batch_size_stages(training: TrainingConfig) -> list[tuple[int, int]]:
    """(rows of a step, number of such steps) over a whole run, in order."""
    rows, steps = 0, training.steps
    stages: list[tuple[int, int]] = []
    while steps > 0:
        size = batch_size(training, rows)
        count = steps
        if size < training.global_batch_size:
            count = min(steps, -(-(_end_of(training, size) - rows) // size))
        stages.append((size, count))
        rows, steps = rows + count * size, steps - count
    return stages


def full_steps(training: TrainingConfig, begin: int, end: int) -> float:
    """The rows of the steps `begin` to `end` (the first step is 0), in steps of `global_batch_size` rows."""
    rows, start = 0, 0
    for size, count in batch_size_stages(training):
        rows += size * max(0, min(end, start + count) - max(begin, start))
        start += count
    return rows / training.global_batch_size


def _num_increments(training: TrainingConfig) -> int:
    start, increment, _ = training.rampup_batch_size
    return (training.global_batch_size - start) // increment


def _end_of(training: TrainingConfig, size: int) -> int:
    """Rows after which steps are larger than `size`."""
    start, increment, samples = training.rampup_batch_size
    return -(-((size - start) // increment + 1) * samples // _num_increments(training))
