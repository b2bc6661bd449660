from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.loader import batches, collate, prefetched

GLOBAL = 12
#: 37 documents, so that rows per epoch and the global batch do not divide each other
DOCUMENTS = [[50 * document + i for i in range(1, 3 + 7 * document % 23)] for document in range(1, 38)]


@pytest.fixture
def dataset(write_tokens):
    dataset = PackedDataset([write_tokens(DOCUMENTS)], seq_length=16, cycle_length=4, pad_token_id=0, shuffle_seed=1)
    assert dataset.rows_per_epoch % GLOBAL != 0
    return dataset


def rank_batches(dataset, *, first_row=0, micro=1, rank=0, size=1, end_row=None, rows_of_batch=lambda _: GLOBAL):
    return batches(
        dataset,
        make_batch=collate,
        first_row=first_row,
        rows_of_batch=rows_of_batch,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
        end_row=end_row,
    )


def global_batch_rows(dataset, *, number, micro, size, first_row=0):
    """The rows of one global batch, gathered from all ranks, as a sorted list of token lists."""
    per_rank = GLOBAL // (micro * size)
    rows = []
    for rank in range(size):
        stream = rank_batches(dataset, first_row=first_row, micro=micro, rank=rank, size=size)
        for batch in islice(stream, number * per_rank, (number + 1) * per_rank):
            assert batch.tokens_BN.shape == (micro, 16)
            rows += batch.tokens_BN.tolist()
    return sorted(rows)


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (3, 1), (1, 2), (2, 3), (1, 12), (6, 2)])
def test_a_global_batch_holds_the_same_rows_for_any_layout(dataset, micro, size):
    number = dataset.rows_per_epoch // GLOBAL  # the batch that straddles two epochs
    expected = sorted(dataset[i].tokens_N.tolist() for i in range(number * GLOBAL, (number + 1) * GLOBAL))
    assert number * GLOBAL < dataset.rows_per_epoch < (number + 1) * GLOBAL
    assert global_batch_rows(dataset, number=number, micro=micro, size=size) == expected


def test_one_rank_yields_rows_in_order(dataset):
    first, second = islice(rank_batches(dataset, micro=4), 2)
    for j in range(4):
        assert first.tokens_BN[j].tolist() == dataset[j].tokens_N.tolist()
        assert second.tokens_BN[j].tolist() == dataset[4 + j].tokens_N.tolist()


def test_ranks_take_rows_in_turn_within_a_microbatch(dataset):
    batch = next(rank_batches(dataset, micro=2, rank=1, size=3))
    assert batch.tokens_BN.tolist() == [dataset[2].tokens_N.tolist(), dataset[3].tokens_N.tolist()]


@pytest.mark.parametrize("consumed", [GLOBAL, 5 * GLOBAL, 7])
def test_a_run_resumes_at_any_row_on_another_number_of_ranks(dataset, consumed):
    resumed = global_batch_rows(dataset, number=1, micro=2, size=3, first_row=consumed)
    begin = consumed + GLOBAL
    assert resumed == sorted(dataset[i].tokens_N.tolist() for i in range(begin, begin + GLOBAL))


@pytest.mark.parametrize(("consumed", "micro", "size"), [(0, 1, 1), (0, 2, 2), (4, 4, 1), (12, 1, 4), (20, 2, 2)])
def test_growing_batches_hold_the_rows_in_order_from_any_of_them_on(dataset, consumed, micro, size):
    """Batches of 4, 4, 4, 8, 8 and then 12 rows."""
    sizes = {0: 4, 4: 4, 8: 4, 12: 8, 20: 8, 28: 12}
    streams = [
        rank_batches(dataset, first_row=consumed, micro=micro, rank=rank, size=size, rows_of_batch=sizes.__getitem__)
        for rank in range(size)
    ]
    begin = consumed
    while begin < 40:
        rows = [row for _ in range(sizes[begin] // (micro * size)) for one in streams for row in next(one).tokens_BN.tolist()]
        assert rows == [dataset[index].tokens_N.tolist() for index in range(begin, begin + sizes[begin])]
        begin += sizes[begin]


def test_resumed_batches_equal_the_uninterrupted_ones(dataset):
    whole = list(islice(rank_batches(dataset, micro=3, rank=1, size=2), 10))
    resumed = list(islice(rank_batches(dataset, first_row=3 * GLOBAL, micro=3, rank=1, size=2), 4))
    for expected, batch in zip(whole[6:], resumed):
        assert torch.equal(batch.tokens_BN, expected.tokens_BN)
        assert torch.equal(batch.labels_BN, expected.labels_BN)
        assert torch.equal(batch.loss_mask_BN, expected.loss_mask_BN)
        assert torch.equal(batch.positions_BN, expected.positions_BN)
        assert batch.document_lengths == expected.document_lengths


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pass_over_an_epoch_sees_each_target_once_and_all_ranks_take_equally_many_steps(dataset, size):
    streams = [list(rank_batches(dataset, micro=2, rank=rank, size=size, end_row=dataset.rows_per_epoch)) for rank in range(size)]
    steps = -(-dataset.rows_per_epoch // GLOBAL) * GLOBAL // (2 * size)
    assert [len(stream) for stream in streams] == [steps] * size
    targets = [
        pair
        for stream in streams
        for batch in stream
        for pair in zip(batch.tokens_BN[batch.loss_mask_BN == 1].tolist(), batch.labels_BN[batch.loss_mask_BN == 1].tolist())
    ]
    assert sorted(targets) == sorted(pair for document in DOCUMENTS for pair in pairwise(document))
    last = streams[-1][-1]
    assert last.loss_mask_BN.sum() == 0  # the interesting case: a rank whose last microbatch has no target
    assert last.document_lengths == ((16,), (16,))


def test_collated_rows_keep_their_types_and_lengths(dataset):
    batch = collate([dataset[0], dataset[1]])
    for tensor in (batch.tokens_BN, batch.labels_BN, batch.positions_BN):
        assert tensor.dtype == torch.int64 and tensor.shape == (2, 16)
    assert batch.loss_mask_BN.dtype == torch.float32
    assert batch.document_lengths == (dataset[0].document_lengths, dataset[1].document_lengths)
    assert [sum(lengths) for lengths in batch.document_lengths] == [16, 16]
    np.testing.assert_array_equal(batch.positions_BN[1].numpy(), dataset[1].positions_N)


def test_a_batch_that_ranks_do_not_divide_fails_at_the_call(dataset):
    with pytest.raises(AssertionError, match="global batch of 12 rows, 5 rows x 1 ranks"):
        rank_batches(dataset, micro=5)


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_reading_ahead_changes_no_batch(dataset, depth):
    expected = list(rank_batches(dataset, micro=2, end_row=dataset.rows_per_epoch))
    got = list(prefetched(rank_batches(dataset, micro=2, end_row=dataset.rows_per_epoch), depth=depth))
    assert len(got) == len(expected) > 5
    assert all(torch.equal(a.tokens_BN, b.tokens_BN) for a, b in zip(got, expected))


def test_reading_ahead_goes_so_far_and_ends_with_its_reader(dataset):
    import threading
    import time

    drawn = []
    endless = rank_batches(dataset)
    stream = prefetched((drawn.append(1) or batch for batch in endless), depth=3)
    next(stream)
    time.sleep(0.2)
    assert 2 <= len(drawn) <= 5  # one given, three ready, one in hand
    assert "read ahead" in {thread.name for thread in threading.enumerate()}
    del stream
    assert "read ahead" not in {thread.name for thread in threading.enumerate()}


def test_an_error_in_reading_reaches_the_reader_at_its_batch(dataset):
    def broken():
        yield next(rank_batches(dataset))
        raise ZeroDivisionError("the disk")

    stream = prefetched(broken(), depth=2)
    next(stream)
    with pytest.raises(ZeroDivisionError, match="the disk"):
        next(stream)
