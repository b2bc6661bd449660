"""Packing against its definition, written out slot by slot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.cycle import complete_length, phase
from megatron_dmtd.data.dataset import fill_row
from megatron_dmtd.data.packing import PADDING, EpochPlan, Piece, epoch_order

PAD = 7


@st.composite
def corpora(draw):
    """(document lengths, order, row length, cycle length), small enough that documents are cut and rows hold several."""
    cycle_length = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    order = draw(st.permutations(range(len(lengths))))
    return lengths, order, cycle_length * draw(st.integers(1, 6)), cycle_length


def slots_by_definition(lengths, order, seq_length, cycle_length):
    """The whole stream, one (document, input) or None a slot, as rows: slow and obvious."""
    stream = []
    for document in order:
        inputs = [(document, i) for i in range(lengths[document] - 1)]
        stream += inputs
        stream += [None] * (complete_length(len(inputs), cycle_length) - len(inputs))
    stream += [None] * (-len(stream) % seq_length)
    return [stream[i : i + seq_length] for i in range(0, len(stream), seq_length)]


def slots_of_plan(plan):
    rows = []
    for index in range(plan.num_rows):
        row = []
        for piece in plan.row(index):
            row += [(piece.document, piece.start + i) for i in range(piece.num_inputs)]
            row += [None] * (piece.num_slots - piece.num_inputs)
        rows.append(row)
    return rows


def plan_of(corpus):
    lengths, order, seq_length, cycle_length = corpus
    return EpochPlan(lengths, order, seq_length=seq_length, cycle_length=cycle_length)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(corpora())
def test_rows_are_those_of_the_definition(corpus):
    assert slots_of_plan(plan_of(corpus)) == slots_by_definition(*corpus)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(corpora())
def test_every_target_occurs_exactly_once(corpus):
    lengths = corpus[0]
    plan = plan_of(corpus)
    seen = sorted(slot for row in slots_of_plan(plan) for slot in row if slot is not None)
    assert seen == [(document, i) for document, length in enumerate(lengths) for i in range(length - 1)]
    assert plan.num_targets == len(seen)
    assert plan.num_skipped == sum(length < 2 for length in lengths)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(corpora())
def test_pieces_are_whole_cycles_that_fill_the_row(corpus):
    _, _, seq_length, cycle_length = corpus
    plan = plan_of(corpus)
    for index in range(plan.num_rows):
        pieces = plan.row(index)
        assert sum(piece.num_slots for piece in pieces) == seq_length
        for piece in pieces:
            assert phase(piece.num_slots, cycle_length) == 0
            assert phase(piece.start, cycle_length) == 0
            # padding only completes a last cycle, except in the padding document at the end of the epoch
            if piece.document == PADDING:
                assert index == plan.num_rows - 1 and piece == pieces[-1]
            else:
                assert piece.num_slots - piece.num_inputs < cycle_length


def token(document, index):
    """A different id for every token of a corpus."""
    return 100 + 1000 * document + index


def read(document, start, count):
    return np.array([token(document, start + i) for i in range(count)], dtype=np.int32)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(corpora())
def test_filled_rows_hold_the_next_token_of_the_same_document_wherever_there_is_loss(corpus):
    _, _, seq_length, cycle_length = corpus
    plan = plan_of(corpus)
    num_targets = 0
    for index in range(plan.num_rows):
        pieces = plan.row(index)
        row = fill_row(pieces, read, seq_length=seq_length, pad_token_id=PAD)
        real = row.loss_mask_N == 1.0
        num_targets += int(real.sum())
        np.testing.assert_array_equal(row.labels_N[real], row.tokens_N[real] + 1)  # of another document: 1000 apart
        assert (row.tokens_N[~real] == PAD).all() and (row.labels_N[~real] == PAD).all()
        assert set(row.loss_mask_N.tolist()) <= {0.0, 1.0}
        assert row.document_lengths == tuple(piece.num_slots for piece in pieces)
        expected_positions = np.concatenate([np.arange(length) for length in row.document_lengths])
        np.testing.assert_array_equal(row.positions_N, expected_positions)
        # the same cycle layout in every row
        np.testing.assert_array_equal(phase(row.positions_N, cycle_length), phase(np.arange(seq_length), cycle_length))
    assert num_targets == plan.num_targets


def test_a_row_written_out():
    # 6 tokens: 5 inputs, 8 slots. 1 token: no target. 10 tokens: 9 inputs, 12 slots, cut after 4. In all 20 slots, 2 rows of 12.
    plan = EpochPlan([6, 1, 10], [0, 1, 2], seq_length=12, cycle_length=4)
    assert (plan.num_rows, plan.num_slots, plan.num_targets, plan.num_skipped) == (2, 20, 14, 1)
    assert plan.row(0) == [
        Piece(document=0, start=0, num_inputs=5, num_slots=8),
        Piece(document=2, start=0, num_inputs=4, num_slots=4),
    ]
    assert plan.row(1) == [
        Piece(document=2, start=4, num_inputs=5, num_slots=8),
        Piece(document=PADDING, start=0, num_inputs=0, num_slots=4),
    ]
    row = fill_row(plan.row(0), read, seq_length=12, pad_token_id=PAD)
    assert row.tokens_N.tolist() == [100, 101, 102, 103, 104, 7, 7, 7, 2100, 2101, 2102, 2103]
    assert row.labels_N.tolist() == [101, 102, 103, 104, 105, 7, 7, 7, 2101, 2102, 2103, 2104]
    assert row.loss_mask_N.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert row.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert row.document_lengths == (8, 4)


def test_a_pad_id_that_equals_eos_changes_nothing_but_the_padding_itself():
    eos = token(0, 5)  # the last token of document 0
    plan = EpochPlan([6], [0], seq_length=8, cycle_length=4)
    apart = fill_row(plan.row(0), read, seq_length=8, pad_token_id=PAD)
    equal = fill_row(plan.row(0), read, seq_length=8, pad_token_id=eos)
    assert equal.labels_N.tolist() == [101, 102, 103, 104, 105, 105, 105, 105]
    assert equal.loss_mask_N.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]  # EOS itself is learnt, its look-alikes are not
    np.testing.assert_array_equal(equal.loss_mask_N, apart.loss_mask_N)
    np.testing.assert_array_equal(equal.positions_N, apart.positions_N)
    assert equal.document_lengths == apart.document_lengths


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(2, 4), (4, 4), (5, 4), (6, 8)])
def test_documents_around_one_cycle_are_completed(num_tokens, num_slots):
    plan = EpochPlan([num_tokens], [0], seq_length=8, cycle_length=4)
    assert plan.row(0)[0] == Piece(document=0, start=0, num_inputs=num_tokens - 1, num_slots=num_slots)


def test_a_document_longer_than_a_row_starts_again_at_position_0():
    plan = EpochPlan([12], [0], seq_length=8, cycle_length=4)
    assert plan.num_rows == 2
    second = fill_row(plan.row(1), read, seq_length=8, pad_token_id=PAD)
    assert second.tokens_N.tolist() == [108, 109, 110, 7, 7, 7, 7, 7]
    assert second.positions_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_corpus_without_a_target_has_no_rows():
    plan = EpochPlan([0, 1], [1, 0], seq_length=8, cycle_length=4)
    assert (plan.num_rows, plan.num_targets, plan.num_skipped) == (0, 0, 2)


def test_slots_beyond_two_to_the_31_are_counted_in_64_bits():
    plan = EpochPlan(np.full(3, 2**30 + 1, dtype=np.int32), [0, 1, 2], seq_length=2**20, cycle_length=4)
    assert plan.num_rows == 3 * 2**10
    assert plan.row(plan.num_rows - 1) == [Piece(document=2, start=2**30 - 2**20, num_inputs=2**20, num_slots=2**20)]


def test_epoch_orders_are_these_on_every_machine():
    assert epoch_order(10, shuffle_seed=1234, epoch=0).tolist() == [8, 1, 6, 2, 0, 3, 5, 7, 4, 9]
    assert epoch_order(10, shuffle_seed=1234, epoch=1).tolist() == [8, 3, 6, 7, 0, 5, 4, 9, 1, 2]
    assert epoch_order(10, shuffle_seed=1235, epoch=0).tolist() == [0, 2, 3, 8, 5, 4, 7, 9, 6, 1]


def test_an_order_is_a_permutation_and_none_keeps_the_order_of_the_files():
    assert sorted(epoch_order(1000, shuffle_seed=0, epoch=3).tolist()) == list(range(1000))
    assert epoch_order(4, shuffle_seed=None, epoch=5).tolist() == [0, 1, 2, 3]
