"""A source of rows that is no corpus: rows of a type of its own, without epochs, made when they are asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import pytest

from megatron_dmtd.data.batches.loader import batches, prefetched
from megatron_dmtd.data.batches.rows import RowSource


@dataclass(frozen=True)
class Rollout:
    """A row of another kind than those of a corpus."""

    number: int
    reward: float


class Rollouts:
    """Rows that follow from their numbers alone."""

    rows_per_epoch, targets_per_epoch = 0, 0

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitem__(self, index: int, /) -> Rollout:
        self.asked.append(index)
        return Rollout(number=index, reward=index * 0.5)

    def padding_row(self) -> Rollout:
        return Rollout(number=-1, reward=0.0)


def mean_reward(rows: Sequence[Rollout]) -> tuple[list[int], float]:
    return [row.number for row in rows], sum(row.reward for row in rows) / len(rows)


def stream(
    source: RowSource[Rollout], *, first_row: int = 0, micro: int = 2, rank: int = 0, size: int = 1, end_row: int | None = None
) -> Iterator[tuple[list[int], float]]:
    return batches(
        source,
        make_batch=mean_reward,
        first_row=first_row,
        rows_of_batch=lambda row: 4 if row < 8 else 8,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
        end_row=end_row,
    )


@pytest.mark.parametrize("depth", [0, 3])
def test_rows_of_any_type_become_the_batches_that_their_objective_makes(depth: int) -> None:
    source = Rollouts()
    assert list(islice(prefetched(stream(source), depth=depth), 3)) == [([0, 1], 0.25), ([2, 3], 1.25), ([4, 5], 2.25)]
    assert source.asked[:6] == list(range(6))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_goes_on_at_the_number_of_rows_consumed_on_any_number_of_ranks(size: int) -> None:
    """Two global batches of 4 rows, then one of 8: the resumed run neither repeats nor loses a row."""
    for consumed, num_rows in ((0, 4), (4, 4), (8, 8)):
        rows = []
        for rank in range(size):
            resumed = stream(Rollouts(), first_row=consumed, micro=1, rank=rank, size=size)
            for numbers, _ in islice(resumed, num_rows // size):
                rows += numbers
        assert sorted(rows) == list(range(consumed, consumed + num_rows))


def test_an_evaluation_is_completed_with_padding_rows() -> None:
    assert [numbers for numbers, _ in stream(Rollouts(), end_row=5)] == [[0, 1], [2, 3], [4, -1], [-1, -1]]
