"""Token files from documents: what is in them, and that nothing half-made can be taken for one."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.dataset import PackedDataset
from megatron_dmtd.data.documents import Document, open_source
from megatron_dmtd.data.manifest import read_manifest
from megatron_dmtd.data.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.tokenizer import load_tokenizer, train_bpe
from megatron_dmtd.errors import DataError

TEXTS = ["the cat sat on the mat\n", "", "é <|mask|> and <|endoftext|> are text", "def f(x):\n    return x\n"]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, vocab_size=290, output_dir=folder, min_frequency=1)
    return str(folder)


@pytest.fixture
def options(tokenizer_dir, tmp_path):
    def make(**changes):
        return PreprocessOptions(**{"tokenizer_dir": tokenizer_dir, "output_prefix": str(tmp_path / "out" / "c"), **changes})

    return make


def source_of(tmp_path, texts=TEXTS):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_source([str(path)])


def megatron_documents(prefix):
    """The documents of a token file, by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))  # one sequence per document
    return [dataset[i].tolist() for i in range(len(dataset))], dataset.index.dtype


def names_of_output(options):
    folder = Path(options.output_prefix).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_megatron_reads_the_texts_back_each_ended_by_eos(tmp_path, options, tokenizer_dir):
    preprocess(source_of(tmp_path), options())
    documents, dtype = megatron_documents(options().output_prefix)
    tokenizer = load_tokenizer(tokenizer_dir)
    assert dtype == np.uint16
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == [text for text in TEXTS if text]
    for ids in documents:
        assert ids[-1] == tokenizer.eos_token_id == 0
        assert not {0, 1, 2} & set(ids[:-1])  # although a text spells two of them


def test_the_manifest_counts_what_megatron_reads(tmp_path, options):
    (manifest,) = preprocess(source_of(tmp_path), options()).values()
    documents, _ = megatron_documents(options().output_prefix)
    assert manifest == read_manifest(options().output_prefix)
    assert (manifest.num_documents, manifest.num_empty) == (3, 1)
    assert manifest.num_tokens == sum(map(len, documents))
    assert manifest.max_token_id == max(map(max, documents))
    assert (manifest.eos_token_id, manifest.pad_token_id, manifest.mask_token_id) == (0, 1, 2)
    assert (manifest.split, manifest.dtype, manifest.vocab_size) == ("all", "uint16", 290)
    assert names_of_output(options()) == ["c.bin", "c.idx", "c.json"]


def test_files_that_are_not_text_are_named_in_the_manifest(tmp_path, options):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the cat")
    (tmp_path / "texts" / "b.txt").write_bytes(b"\xff\xfe")
    (manifest,) = preprocess(open_source([str(tmp_path / "texts")]), options()).values()
    assert (manifest.num_documents, manifest.skipped) == (1, ["b.txt"])


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path, options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<mask>": 1} | {f"w{i}": i for i in range(2, 70_000)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", mask_token="<mask>")
    tokenizer.save_pretrained(tmp_path / "large")
    large = options(tokenizer_dir=str(tmp_path / "large"))
    (manifest,) = preprocess(source_of(tmp_path, ["w5 w69700", "w7"]), large).values()
    documents, dtype = megatron_documents(large.output_prefix)
    assert dtype == np.int32 and manifest.dtype == "int32"
    assert documents == [[5, 69_700, 0], [7, 0]]
    assert manifest.max_token_id == 69_700


def test_more_documents_than_one_batch_keep_their_order(tmp_path, options, tokenizer_dir):
    texts = [f"x = {i}" for i in range(2500)]
    preprocess(source_of(tmp_path, texts), options())
    documents, _ = megatron_documents(options().output_prefix)
    tokenizer = load_tokenizer(tokenizer_dir)
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == texts


def test_a_heldout_split_makes_two_disjoint_files_of_all_documents(tmp_path, options, tokenizer_dir):
    texts = [f"x = {i}" for i in range(200)]
    manifests = preprocess(source_of(tmp_path, texts), options(heldout_fraction=0.1))
    prefix = options().output_prefix
    assert list(manifests) == [prefix + "-train", prefix + "-heldout"]
    tokenizer = load_tokenizer(tokenizer_dir)
    train, heldout = ([tokenizer.decode(ids[:-1]) for ids in megatron_documents(name)[0]] for name in manifests)
    assert 5 < len(heldout) < 40
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(texts)
    assert [manifest.split for manifest in manifests.values()] == ["train", "heldout"]


def test_the_files_make_a_packed_dataset(tmp_path, options):
    (manifest,) = preprocess(source_of(tmp_path), options()).values()
    dataset = PackedDataset(
        [options().output_prefix],
        seq_length=16,
        cycle_length=4,
        pad_token_id=manifest.pad_token_id,
        shuffle_seed=0,
        vocab_size=manifest.vocab_size,
        mask_token_id=manifest.mask_token_id,
    )
    targets = sum(int(dataset[i].loss_mask_N.sum()) for i in range(dataset.rows_per_epoch))
    assert targets == manifest.num_tokens - manifest.num_documents


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_existing_output_is_replaced_only_on_demand(tmp_path, options, suffix):
    existing = Path(options().output_prefix + suffix)
    existing.parent.mkdir()
    existing.write_text("old")
    with pytest.raises(DataError, match=rf"c\{suffix} already there"):
        preprocess(source_of(tmp_path), options())
    assert names_of_output(options()) == [existing.name] and existing.read_text() == "old"
    preprocess(source_of(tmp_path), options(overwrite=True))
    assert len(megatron_documents(options().output_prefix)[0]) == 3


def test_what_cannot_work_is_refused_before_any_file_is_touched(tmp_path, options):
    empty = tmp_path / "blank.jsonl"
    empty.write_text("\n")
    for source, changes, found in [
        (source_of(tmp_path), {"tokenizer_dir": str(tmp_path)}, r"no file .*tokenizer\.json"),
        (source_of(tmp_path), {"heldout_fraction": 1.0}, "a held-out fraction of 1.0"),
        (source_of(tmp_path), {"mask_token_id": 70}, "MASK id 70, the ordinary token"),
        (open_source([str(empty)]), {}, "no documents in key 'text' of blank.jsonl"),
    ]:
        with pytest.raises(DataError, match=found):
            preprocess(source, options(**changes))
        assert names_of_output(options()) == []


def test_a_corpus_of_empty_documents_leaves_nothing_behind(tmp_path, options):
    with pytest.raises(DataError, match=r"no text in the split 'all' \(2 empty documents\)"):
        preprocess(source_of(tmp_path, ["", ""]), options())
    assert names_of_output(options()) == []


def test_an_empty_split_leaves_nothing_behind(tmp_path, options):
    with pytest.raises(DataError, match="no text in the split 'heldout'"):
        preprocess(source_of(tmp_path), options(heldout_fraction=1e-9))
    assert names_of_output(options()) == []


def test_a_bad_line_in_the_middle_leaves_the_old_files_as_they_were(tmp_path, options):
    preprocess(source_of(tmp_path), options())
    before = {name: (Path(options().output_prefix).parent / name).read_bytes() for name in names_of_output(options())}
    source = source_of(tmp_path, ["the cat"] * 1500)
    with (tmp_path / "texts.jsonl").open("a") as stream:
        stream.write("{\n")
    with pytest.raises(DataError, match="line 1501"):
        preprocess(source, options(overwrite=True))
    after = {name: (Path(options().output_prefix).parent / name).read_bytes() for name in names_of_output(options())}
    assert after == before


class KilledAt:
    """Documents without end, whose process is killed when it asks for number `last`."""

    description = "endless"
    skipped: list[str] = []  # noqa: RUF012 - never changed

    def __init__(self, last):
        self.last = last

    def __iter__(self):
        for i in range(self.last):
            yield Document(name=str(i), text="the cat")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path, options, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork
    preprocess(source_of(tmp_path), options(output_prefix=str(tmp_path / "warm-up")))  # imports what the child needs
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            preprocess(KilledAt(3000), options())
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = names_of_output(options())
    assert left == f"c.bin.partial-{child}"  # it was writing
    with pytest.raises(DataError, match="no file"):
        PackedDataset([options().output_prefix], seq_length=16, cycle_length=4, pad_token_id=1, shuffle_seed=0)
    preprocess(source_of(tmp_path), options())  # and it does not stand in the way of the next run
    assert len(megatron_documents(options().output_prefix)[0]) == 3


@pytest.mark.parametrize("num_renamed", [0, 1, 2])
def test_an_old_index_never_describes_new_tokens(tmp_path, options, monkeypatch, num_renamed):
    preprocess(source_of(tmp_path, ["ab", "abcd"]), options())
    renamed = []
    rename = os.replace

    def fail_after(source, target):
        if len(renamed) == num_renamed:
            raise OSError("disk failure")
        rename(source, target)
        renamed.append(target)

    monkeypatch.setattr(os, "replace", fail_after)
    with pytest.raises(OSError, match="disk failure"):
        preprocess(source_of(tmp_path, ["abcd", "ab"]), options(overwrite=True))  # as many bytes as the old tokens
    assert len(renamed) == num_renamed
    assert names_of_output(options()) == ["c.bin", "c.json"]
