import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.errors import ConfigError, DataError

PAD = 0
#: 40 documents of 0 to 12 tokens, all tokens different
DOCUMENTS = [[100 * document + i for i in range(1, 1 + 5 * document % 13)] for document in range(1, 41)]


def open_dataset(*prefixes, **changes):
    options = {"seq_length": 16, "cycle_length": 4, "pad_token_id": PAD, "shuffle_seed": 3}
    return PackedDataset(prefixes, **{**options, **changes})


def pairs_of(rows):
    """All (input, target) pairs of the rows."""
    pairs = []
    for row in rows:
        real = row.loss_mask_N == 1
        pairs += zip(row.tokens_N[real].tolist(), row.labels_N[real].tolist())
    return pairs


def all_pairs(documents):
    return sorted(pair for document in documents for pair in itertools.pairwise(document))


def test_each_epoch_holds_every_pair_of_the_corpus_once(write_tokens):
    dataset = open_dataset(write_tokens(DOCUMENTS))
    per_epoch = dataset.rows_per_epoch
    assert per_epoch > 10
    assert any(not document for document in DOCUMENTS)
    epochs = [[dataset[epoch * per_epoch + i] for i in range(per_epoch)] for epoch in range(3)]
    for rows in epochs:
        assert sorted(pairs_of(rows)) == all_pairs(DOCUMENTS)
    assert pairs_of(epochs[0]) != pairs_of(epochs[1]) != pairs_of(epochs[2])
    assert dataset.targets_per_epoch == len(all_pairs(DOCUMENTS))
    assert dataset.num_documents == 40
    assert dataset.num_skipped_documents == sum(len(document) < 2 for document in DOCUMENTS)


def test_a_row_is_the_same_whoever_asks_and_whatever_was_read_before(write_tokens):
    prefix = write_tokens(DOCUMENTS)
    one, other = open_dataset(prefix), open_dataset(prefix)
    far = 5 * one.rows_per_epoch + 2
    for index in (0, far, 3, far):
        one[index]
    for index in (far, 1):
        a, b = one[index], other[index]
        np.testing.assert_array_equal(a.tokens_N, b.tokens_N)
        assert a.document_lengths == b.document_lengths


def test_without_a_seed_documents_keep_their_order_in_every_epoch(write_tokens):
    dataset = open_dataset(write_tokens(DOCUMENTS), shuffle_seed=None)
    per_epoch = dataset.rows_per_epoch
    expected = [pair for document in DOCUMENTS for pair in itertools.pairwise(document)]
    assert pairs_of(dataset[i] for i in range(per_epoch)) == expected
    assert pairs_of(dataset[i] for i in range(per_epoch, 2 * per_epoch)) == expected


def test_seeds_differ(write_tokens):
    prefix = write_tokens(DOCUMENTS)
    assert pairs_of([open_dataset(prefix, shuffle_seed=3)[0]]) != pairs_of([open_dataset(prefix, shuffle_seed=4)[0]])


def test_several_files_of_different_types_are_one_corpus(write_tokens):
    first = write_tokens(DOCUMENTS[:15], name="first")
    second = write_tokens(DOCUMENTS[15:], name="second", dtype=np.int32)
    both, whole = open_dataset(first, second), open_dataset(write_tokens(DOCUMENTS, name="whole"))
    assert both.rows_per_epoch == whole.rows_per_epoch
    for i in range(both.rows_per_epoch):
        np.testing.assert_array_equal(both[i].tokens_N, whole[i].tokens_N)
        assert both[i].tokens_N.dtype == np.int64


def test_a_padding_row_has_no_target(write_tokens):
    row = open_dataset(write_tokens(DOCUMENTS), pad_token_id=9).padding_row()
    assert row.tokens_N.tolist() == [9] * 16
    assert row.loss_mask_N.sum() == 0
    assert row.document_lengths == (16,)


def test_rows_that_are_not_whole_cycles_are_refused():
    with pytest.raises(ConfigError, match="rows of 18 slots with cycles of 4"):
        open_dataset("nowhere", seq_length=18)


def test_no_prefix_is_refused():
    with pytest.raises(ConfigError, match="one or more token files"):
        open_dataset()


def test_a_corpus_without_a_target_is_refused(write_tokens):
    with pytest.raises(DataError, match=r"2 documents in .*, all of fewer than 2 tokens"):
        open_dataset(write_tokens([[5], [6]]))


def test_an_id_outside_the_vocabulary_is_refused_at_the_opening(write_tokens):
    prefix = write_tokens([[1, 2], [3, 4000]])
    open_dataset(prefix, vocab_size=4001)
    with pytest.raises(DataError, match="token id 4000 in document 1 of "):
        open_dataset(prefix, vocab_size=4000)


def test_a_mask_id_in_the_text_is_refused_at_the_opening(write_tokens):
    prefix = write_tokens([[1, 2], [3, 4]])
    open_dataset(prefix, mask_token_id=5)
    with pytest.raises(DataError, match="the MASK id 3 in document 1 of "):
        open_dataset(prefix, mask_token_id=3)


def test_what_the_sample_missed_is_refused_when_its_row_is_read(write_tokens):
    documents = [[1, 2, 3]] * 1000
    documents[501] = [1, 4000, 3]
    dataset = open_dataset(write_tokens(documents), vocab_size=4000, shuffle_seed=None)
    dataset[0]  # other rows are read
    with pytest.raises(DataError, match="token id 4000 in document 501 of "):
        [dataset[i] for i in range(dataset.rows_per_epoch)]


def manifest(**changes):
    values = dict.fromkeys(("vocab_size", "eos_token_id", "pad_token_id", "mask_token_id"), 0)
    values |= dict.fromkeys(("dtype", "tokenizer_sha256", "source", "split"), "")
    return values | {"num_documents": 2, "num_tokens": 4, "max_token_id": 4, "heldout_fraction": 0.0} | changes


def test_the_manifest_tells_the_highest_id_of_the_whole_file(write_tokens):
    prefix = write_tokens([[1, 2], [3, 4]])
    Path(prefix + ".json").write_text(json.dumps(manifest(max_token_id=70)))
    open_dataset(prefix, vocab_size=71)
    with pytest.raises(DataError, match="token id 70 in "):
        open_dataset(prefix, vocab_size=70)


def test_a_best_fit_corpus_holds_every_pair_once_per_epoch_and_reports_itself(write_tokens):
    dataset = open_dataset(write_tokens(DOCUMENTS), packing="best-fit")
    per_epoch = dataset.rows_per_epoch
    epochs = [[dataset[epoch * per_epoch + i] for i in range(per_epoch)] for epoch in range(2)]
    for rows in epochs:
        assert sorted(pairs_of(rows)) == all_pairs(DOCUMENTS)
    assert pairs_of(epochs[0]) != pairs_of(epochs[1])
    assert "0.00 % of the documents are cut" in dataset.report()


def with_marks(write_tokens, marks):
    prefix = write_tokens([[1, 2, 3, 4], [5, 6]])
    write_tokens(marks, name="corpus.loss", dtype=np.uint8)
    Path(prefix + ".json").write_text(json.dumps(manifest(num_tokens=6, max_token_id=6, loss="assistant")))
    return prefix


def test_marks_decide_which_targets_carry_loss(write_tokens):
    plain = write_tokens([[7, 8, 9]], name="plain")  # a corpus without marks, blended with one that has them
    dataset = open_dataset(with_marks(write_tokens, [[1, 0, 1, 1], [0, 0]]), plain, shuffle_seed=None)
    row = dataset[0]
    assert row.labels_N[row.loss_mask_N == 1].tolist() == [3, 4, 8, 9]
    assert row.labels_N[:3].tolist() == [2, 3, 4]  # the others are predicted all the same, without loss


@pytest.mark.parametrize("marks", [[[0, 0, 0, 0], [0, 0]], [[1, 0, 0, 0], [1, 0]]])
def test_a_corpus_without_a_marked_target_is_refused(write_tokens, marks):
    """The first token of a document is no target, marked or not."""
    prefix = with_marks(write_tokens, marks)
    with pytest.raises(DataError, match="2 documents, and not one token that carries loss"):
        open_dataset(prefix)
    write_tokens([marks[0], [0, 1]], name="corpus.loss", dtype=np.uint8)
    open_dataset(prefix)


@pytest.mark.parametrize("marks", [[[1, 0, 1, 1]], [[1, 0, 1, 1], [0]]])
def test_marks_of_another_corpus_are_refused(write_tokens, marks):
    with pytest.raises(DataError, match="loss marks for"):
        open_dataset(with_marks(write_tokens, marks))


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_the_rows_of_a_long_document_do_not_follow_each_other(write_tokens, packing):
    dataset = open_dataset(write_tokens([[1000 * d + i for i in range(1, 400)] for d in range(1, 9)]), packing=packing)
    documents = [int(dataset[i].tokens_N[0]) // 1000 for i in range(dataset.rows_per_epoch)]
    assert len(documents) > 190
    neighbours = sum(a == b for a, b in itertools.pairwise(documents))
    assert neighbours < len(documents) / 4  # one in eight by chance
