import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.data.batches.blending import BlendedDataset, Schedule, exact_shares, open_blend
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.loader import batches, collate
from megatron_dmtd.errors import ConfigError


def test_decimal_weights_are_exact_shares():
    assert exact_shares([0.1, 0.3]) == [Fraction(1, 4), Fraction(3, 4)]
    assert exact_shares([0.001, 0.999]) == [Fraction(1, 1000), Fraction(999, 1000)]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ConfigError, match="the weight"):
        exact_shares([1.0, weight])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9),
    seed=st.integers(0, 5),
    far=st.sampled_from([0, 10**9, 10**15]),
)
def test_every_row_of_every_corpus_comes_once_and_in_order(weights, seed, far):
    schedule = Schedule(exact_shares(weights), seed=seed)
    places = [schedule.place(index) for index in range(far, far + 300)]
    by_corpus = {corpus: [row for one, row in places if one == corpus] for corpus in range(len(weights))}
    for rows in by_corpus.values():
        assert rows == list(range(rows[0], rows[0] + len(rows))) if rows else True
        assert far or not rows or rows[0] == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=9), seed=st.integers(0, 5), index=st.integers(0, 10**15))
def test_shares_hold_after_any_number_of_rows_to_within_a_row_per_halving(weights, seed, index):
    shares = exact_shares(weights)
    corpus, row = Schedule(shares, seed=seed).place(index)
    # `row` rows of this corpus came before row `index`
    assert abs(row - index * shares[corpus]) <= len(weights).bit_length() + 1


def test_a_thousandth_is_one_row_in_every_thousand():
    schedule = Schedule(exact_shares([0.001, 0.999]), seed=1)
    turns = [index for index in range(10_000) if schedule.place(index)[0] == 0]
    assert len(turns) == 10 and {b - a for a, b in itertools.pairwise(turns)} == {1000}


def test_a_blend_is_this_one_on_every_machine():
    places = [Schedule(exact_shares([1, 2, 1]), seed=7).place(index) for index in range(12)]
    assert Counter(corpus for corpus, _ in places) == {0: 3, 1: 6, 2: 3}
    assert [corpus for corpus, _ in places] == [1, 2, 0, 1, 1, 2, 0, 1, 1, 2, 0, 1]
    assert places != [Schedule(exact_shares([1, 2, 1]), seed=8).place(index) for index in range(12)]


@pytest.fixture
def blend(write_tokens):
    def corpus(name, base, num_documents):
        prefix = write_tokens([[base + 40 * d + i for i in range(1, 18)] for d in range(num_documents)], name=name)
        return PackedDataset([prefix], seq_length=16, cycle_length=4, pad_token_id=0, shuffle_seed=3)

    return BlendedDataset([corpus("a", 0, 3), corpus("b", 1000, 11)], [0.25, 0.75], seed=3)


def test_rows_come_from_the_corpora_by_weight_and_small_ones_repeat_in_new_epochs(blend):
    rows = [blend[index] for index in range(48)]
    from_a = [row for row in rows if row.tokens_N.max() < 1000]
    assert len(from_a) == 12 and len(from_a) > 3 * blend.datasets[0].rows_per_epoch
    for epoch in range(4):  # each epoch of the small corpus holds each of its documents
        firsts = [int(row.tokens_N[0]) for row in from_a[3 * epoch : 3 * epoch + 3]]
        assert sorted(firsts) == [1, 41, 81]
    assert len({tuple(int(row.tokens_N[0]) for row in from_a[3 * e : 3 * e + 3]) for e in range(4)}) > 1
    assert blend.report(48)[0].startswith("25 % of the rows, 4 epochs: 3 documents in 3 rows of 16")
    assert (blend.rows_per_epoch, blend.targets_per_epoch) == (14, 14 * 16)
    assert blend.padding_row().loss_mask_N.sum() == 0


@pytest.mark.parametrize(("consumed", "size"), [(0, 1), (7, 1), (12, 3), (29, 2)])
def test_a_blend_goes_on_at_any_row_on_any_number_of_ranks(blend, consumed, size):
    expected = sorted(blend[index].tokens_N.tolist() for index in range(consumed, consumed + 12))
    rows = []
    for rank in range(size):
        stream = batches(
            blend,
            make_batch=collate,
            first_row=consumed,
            rows_of_batch=lambda _: 12,
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=size,
        )
        for batch in itertools.islice(stream, 6 // size):
            rows += batch.tokens_BN.tolist()
    assert sorted(rows) == expected


def test_each_token_file_has_its_own_weight_and_without_weights_they_are_one_corpus(blend, tmp_path):
    def open_corpus(prefixes):
        return PackedDataset(prefixes, seq_length=16, cycle_length=4, pad_token_id=0, shuffle_seed=3)

    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    again = open_blend(open_corpus, prefixes, [0.25, 0.75], seed=3)
    assert all(np.array_equal(again[i].tokens_N, blend[i].tokens_N) for i in range(40))
    whole, expected = open_blend(open_corpus, prefixes, (), seed=3), open_corpus(tuple(prefixes))
    assert all(np.array_equal(whole[i].tokens_N, expected[i].tokens_N) for i in range(whole.rows_per_epoch))


def test_each_corpus_needs_a_weight(blend):
    with pytest.raises(ConfigError, match="1 weights for 2 corpora"):
        BlendedDataset(blend.datasets, [1.0], seed=0)


def test_one_corpus_is_itself(blend):
    alone = BlendedDataset(blend.datasets[:1], [7.0], seed=0)
    np.testing.assert_array_equal(alone[5].tokens_N, blend.datasets[0][5].tokens_N)
