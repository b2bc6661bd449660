"""Batch sizes that grow: Megatron's numbers, in exact integers, from the number of rows alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.config import TrainingConfig, batch_size, batch_size_stages, batch_sizes


def _training(start: int, increment: int, samples: int, full: int, steps: int = 1000) -> TrainingConfig:
    return TrainingConfig(global_batch_size=full, rampup_batch_size=(start, increment, samples), steps=steps)


RAMPS = st.builds(
    lambda start, increment, number, samples: (start, increment, samples, start + increment * number),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 2000),
)


def test_without_a_ramp_up_all_steps_are_alike() -> None:
    training = TrainingConfig(global_batch_size=12, steps=7)
    assert [batch_size(training, rows) for rows in (0, 1, 10**12)] == [12, 12, 12]
    assert list(batch_sizes(training)) == [12]
    assert batch_size_stages(training) == [(12, 7)]


def test_a_ramp_by_hand() -> None:
    """From 4 to 16 by 4 over 90 rows: three increments, one every 30 rows."""
    training = _training(4, 4, 90, 16, steps=20)
    assert [batch_size(training, rows) for rows in (0, 29, 30, 59, 60, 89, 90, 91)] == [4, 4, 8, 8, 12, 12, 16, 16]
    assert list(batch_sizes(training)) == [4, 8, 12, 16]
    # eight steps of 4 end at row 32, four of 8 at 64, three of 12 at 100
    assert batch_size_stages(training) == [(4, 8), (8, 4), (12, 3), (16, 5)]


def test_a_step_may_jump_over_a_size() -> None:
    assert batch_size_stages(_training(8, 1, 4, 12, steps=3)) == [(8, 1), (12, 2)]


@given(ramp=RAMPS, steps=st.integers(1, 300))
def test_stages_are_the_steps_counted_one_by_one(ramp: tuple[int, int, int, int], steps: int) -> None:
    training = _training(*ramp, steps=steps)
    rows, sizes = 0, []
    for _ in range(steps):
        sizes.append(batch_size(training, rows))
        rows += sizes[-1]
    assert [size for size, count in batch_size_stages(training) for _ in range(count)] == sizes
    assert sizes == sorted(sizes) and set(sizes) <= set(batch_sizes(training))


@settings(deadline=None)  # the first one imports Megatron
@given(ramp=RAMPS, share=st.floats(0, 1.5))
def test_sizes_are_those_of_megatron(ramp: tuple[int, int, int, int], share: float) -> None:
    """Where its floating-point division is exact: SAMPLES is a multiple of the number of increments."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    start, increment, samples, full = ramp
    samples *= (full - start) // increment
    theirs = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, samples)
    rows = int(share * samples)
    theirs.update(rows, consistency_check=True)
    assert batch_size(_training(start, increment, samples, full), rows) == theirs.get_current_global_batch_size()
