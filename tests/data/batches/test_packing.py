"""Packing against its definition, written out slot by slot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.cycle import complete_length, phase
from megatron_dmtd.data.batches.dataset import fill_row
from megatron_dmtd.data.batches.packing import PADDING, BestFitPlan, EpochPlan, Piece, epoch_order, packing_report

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


def best_fit_of(corpus, *, shuffled=False):
    lengths, order, seq_length, cycle_length = corpus
    row_order = (lambda num_rows: epoch_order(num_rows, shuffle_seed=1, epoch=0)) if shuffled else None
    return BestFitPlan(lengths, order, seq_length=seq_length, cycle_length=cycle_length, row_order=row_order)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(corpora(), st.booleans())
def test_best_fit_holds_every_target_once_and_cuts_no_document_that_fits_a_row(corpus, shuffled):
    lengths, _, seq_length, _ = corpus
    plan = best_fit_of(corpus, shuffled=shuffled)
    rows = slots_of_plan(plan)
    seen = sorted(slot for row in rows for slot in row if slot is not None)
    assert seen == [(document, i) for document, length in enumerate(lengths) for i in range(length - 1)]
    assert plan.num_targets == len(seen) and plan.num_skipped == sum(length < 2 for length in lengths)
    for document, length in enumerate(lengths):
        holding = sum(any(slot is not None and slot[0] == document for slot in row) for row in rows)
        assert holding == -(-(length - 1) // seq_length) if length > 1 else holding == 0
    assert plan.counts.num_cut == sum(length - 1 > seq_length for length in lengths)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(corpora())
def test_best_fit_rows_carry_real_targets_that_cross_no_document_in_one_cycle_layout(corpus):
    _, _, seq_length, cycle_length = corpus
    plan = best_fit_of(corpus)
    for index in range(plan.num_rows):
        pieces = plan.row(index)
        assert all(phase(piece.num_slots, cycle_length) == 0 and piece.num_slots > 0 for piece in pieces)
        assert all(piece.document != PADDING for piece in pieces[:-1])
        row = fill_row(pieces, read, seq_length=seq_length, pad_token_id=PAD)
        real = row.loss_mask_N == 1
        np.testing.assert_array_equal(row.labels_N[real], row.tokens_N[real] + 1)
        assert sum(row.document_lengths) == seq_length
        np.testing.assert_array_equal(row.positions_N, np.concatenate([np.arange(length) for length in row.document_lengths]))
        np.testing.assert_array_equal(phase(row.positions_N, cycle_length), phase(np.arange(seq_length), cycle_length))


def best_fit_decreasing_one_by_one(sizes, capacity):
    """The definition: each piece, the largest first, goes into the bin with the least room that holds it. Rooms that remain."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [nth for nth, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda nth: rooms[nth])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 41), min_size=1, max_size=40), st.integers(3, 10))
def test_rooms_are_those_of_best_fit_decreasing_one_piece_at_a_time(lengths, row_cycles):
    plan = BestFitPlan(lengths, range(len(lengths)), seq_length=4 * row_cycles, cycle_length=4)
    rests = [complete_length((length - 1) % (4 * row_cycles), 4) // 4 for length in lengths if (length - 1) % (4 * row_cycles)]
    rooms = [sum(piece.num_slots for piece in plan.row(i) if piece.document == PADDING) // 4 for i in range(plan.num_rows)]
    whole = sum((length - 1) // (4 * row_cycles) for length in lengths)
    assert sorted(rooms) == sorted(best_fit_decreasing_one_by_one(rests, row_cycles) + [0] * whole)


def test_a_best_fit_row_written_out():
    # inputs 5, 9, 3, 20: slots 8, 12, 4, and 20 = one row of 12 and a rest of 8
    plan = BestFitPlan([6, 10, 4, 21], [0, 1, 2, 3], seq_length=12, cycle_length=4)
    rows = [plan.row(index) for index in range(plan.num_rows)]
    assert rows == [
        [
            Piece(document=0, start=0, num_inputs=5, num_slots=8),
            Piece(document=2, start=0, num_inputs=3, num_slots=4),
        ],
        [Piece(document=1, start=0, num_inputs=9, num_slots=12)],
        [Piece(document=3, start=0, num_inputs=12, num_slots=12)],
        [
            Piece(document=3, start=12, num_inputs=8, num_slots=8),
            Piece(document=PADDING, start=0, num_inputs=0, num_slots=4),
        ],
    ]
    assert (plan.num_targets, plan.counts.num_cut, plan.counts.num_slots) == (37, 1, 44)
    expected = "4 documents in 4 rows of 12, 37 targets; 22.92 % of the slots are padding, 25.00 % of the documents are cut"
    assert packing_report(plan.counts, seq_length=12) == expected


def test_rows_of_best_fit_are_as_many_whatever_the_order():
    lengths = np.random.default_rng(0).integers(0, 60, size=500)
    plans = [
        BestFitPlan(lengths, epoch_order(500, shuffle_seed=5, epoch=epoch), seq_length=32, cycle_length=4) for epoch in range(5)
    ]
    assert len({plan.counts for plan in plans}) == 1
    assert plans[0].row(0) != plans[1].row(0)


def test_concatenation_pads_less_and_best_fit_cuts_less():
    lengths = np.random.default_rng(0).integers(2, 120, size=400)
    concatenated = EpochPlan(lengths, range(400), seq_length=128, cycle_length=4).counts
    fitted = BestFitPlan(lengths, range(400), seq_length=128, cycle_length=4).counts
    assert concatenated.num_rows < fitted.num_rows < 1.05 * concatenated.num_rows
    assert fitted.num_cut == 0 and concatenated.num_cut > 100


def test_a_corpus_without_a_target_has_no_best_fit_rows():
    plan = BestFitPlan([0, 1], [1, 0], seq_length=8, cycle_length=4)
    assert (plan.num_rows, plan.num_targets, plan.num_skipped) == (0, 0, 2)
    assert "2 without a target left out" in packing_report(plan.counts, seq_length=8)


def test_best_fit_of_millions_of_documents_takes_seconds():
    import time

    lengths = np.random.default_rng(0).lognormal(6, 1.5, size=1_000_000).astype(np.int64)
    started = time.process_time()
    plan = BestFitPlan(lengths, epoch_order(lengths.size, shuffle_seed=0, epoch=0), seq_length=8192, cycle_length=4)
    assert plan.num_targets == int((lengths - 1).clip(0).sum())
    assert time.process_time() - started < 20
    padding = 1 - plan.num_targets / (plan.num_rows * 8192)
    assert padding < 0.01


def test_shuffled_rows_are_the_same_rows_in_another_order():
    corpus = [40, 3, 90, 17], [0, 1, 2, 3]
    plain = EpochPlan(*corpus, seq_length=16, cycle_length=4)
    order = epoch_order(plain.num_rows, shuffle_seed=1, epoch=0, stream=1)
    shuffled = EpochPlan(*corpus, seq_length=16, cycle_length=4, row_order=lambda num_rows: order[:num_rows])
    assert [shuffled.row(i) for i in range(plain.num_rows)] == [plain.row(i) for i in order.tolist()]
    assert order.tolist() != sorted(order.tolist())
    assert order.tolist() != epoch_order(plain.num_rows, shuffle_seed=1, epoch=0).tolist()
