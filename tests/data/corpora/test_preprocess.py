"""Token files from documents: what is in them, that nothing but inputs and options decides it, and that nothing half-made can be
taken for one."""

import errno
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.data.corpora.documents import RecordKeys
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.data.corpora.text_files import LinesInput
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_dmtd.errors import DataError
from tests.support.tokenizers import chat_tokenizer

TEXTS = ["the cat sat on the mat\n", "é <|mask|> and <|endoftext|> are text", "def f(x):\n    return x\n"]
MANY = [f"x = {i}" for i in range(3000)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS, vocab_size=290)


@pytest.fixture
def options(tokenizer_dir, tmp_path):
    def make(**changes):
        return PreprocessOptions(
            **{"tokenizer_dir": tokenizer_dir, "output_prefix": str(tmp_path / "out" / "c"), "num_workers": 1, **changes}
        )

    return make


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def source_of(tmp_path, texts=TEXTS):
    return open_inputs([str(write_lines(tmp_path / "texts.jsonl", texts))])


def megatron_documents(prefix):
    """The documents of a token file, by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))  # one sequence per document
    return [dataset[i].tolist() for i in range(len(dataset))], dataset.index.dtype


def names_of_output(options):
    folder = Path(options.output_prefix).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def bytes_of_output(options):
    folder = Path(options.output_prefix).parent
    return {name: (folder / name).read_bytes() for name in names_of_output(options)}


def test_megatron_reads_the_texts_back_each_ended_by_eos(tmp_path, options, tokenizer_dir):
    preprocess(source_of(tmp_path), options())
    documents, dtype = megatron_documents(options().output_prefix)
    tokenizer = load_tokenizer(tokenizer_dir)
    assert dtype == np.uint16
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == TEXTS
    for ids in documents:
        assert ids[-1] == tokenizer.eos_token_id == 0
        assert not {0, 1, 2} & set(ids[:-1])  # although a text spells two of them


def test_the_manifest_counts_what_megatron_reads_and_knows_what_made_it(tmp_path, options, tokenizer_dir):
    import hashlib

    inputs = source_of(tmp_path)
    result = preprocess(inputs, options())
    (manifest,) = result.manifests.values()
    documents, _ = megatron_documents(options().output_prefix)
    assert manifest == read_manifest(options().output_prefix)
    assert (manifest.num_documents, manifest.num_tokens) == (3, sum(map(len, documents)))
    assert manifest.max_token_id == max(map(max, documents))
    assert (manifest.eos_token_id, manifest.pad_token_id, manifest.mask_token_id) == (0, 1, 2)
    assert (manifest.split, manifest.dtype, manifest.vocab_size, manifest.loss) == ("all", "uint16", 292, "all")
    assert manifest.tokenizer_sha256 == tokenizer_sha256(tokenizer_dir)
    assert manifest.bin_sha256 == hashlib.sha256(Path(options().output_prefix + ".bin").read_bytes()).hexdigest()
    source = tmp_path / "texts.jsonl"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest.sources == [{"name": str(source), "num_bytes": source.stat().st_size, "sha256": digest}]
    assert names_of_output(options()) == ["c.bin", "c.idx", "c.json"]
    assert result.choice is not None and not result.resumed


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path, options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<mask>": 1} | {f"w{i}": i for i in range(2, 70_000)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", mask_token="<mask>")
    tokenizer.save_pretrained(tmp_path / "large")
    large = options(tokenizer_dir=str(tmp_path / "large"))
    result = preprocess(source_of(tmp_path, ["w5 w69700", "w7"]), large)
    (manifest,) = result.manifests.values()
    assert result.choice is not None and result.choice.name == "tokenizers"
    documents, dtype = megatron_documents(large.output_prefix)
    assert dtype == np.int32 and manifest.dtype == "int32"
    assert documents == [[5, 69_700, 0], [7, 0]]
    assert manifest.max_token_id == 69_700
    with pytest.raises(DataError, match="ids up to 69999 in the type uint16"):
        preprocess(source_of(tmp_path), options(tokenizer_dir=str(tmp_path / "large"), dtype="uint16", overwrite=True))
    preprocess(source_of(tmp_path), options(dtype="int32", overwrite=True))
    assert megatron_documents(options().output_prefix)[1] == np.int32


@pytest.fixture
def mixed_inputs(tmp_path):
    """Three inputs of many blocks."""
    write_lines(tmp_path / "a.jsonl", MANY[:1500])
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in MANY[1500:2500]).encode())
    )
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(MANY[2500:2600]):
        (tmp_path / "texts" / f"{i:03d}.txt").write_text(text)
    return lambda: open_inputs([str(tmp_path / "*.jsonl*"), str(tmp_path / "texts")])


@pytest.mark.multiprocess
def test_the_bytes_do_not_depend_on_workers_library_or_size_of_blocks(tmp_path, options, mixed_inputs, tokenizer_dir):
    outputs = []
    for nth, changes in enumerate(
        [
            {"block_bytes": 2000},
            {"block_bytes": 2000, "num_workers": 2},
            {"block_bytes": 2000, "encoder": "tokenizers"},
            {"block_bytes": 1 << 20, "save_seconds": 0},
        ]
    ):
        made = options(output_prefix=str(tmp_path / f"out{nth}" / "c"), heldout_fraction=0.1, **changes)
        preprocess(mixed_inputs(), made)
        outputs.append(bytes_of_output(made))
    assert sorted(outputs[0]) == [f"c-{split}.{suffix}" for split in ("heldout", "train") for suffix in ("bin", "idx", "json")]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    tokenizer = load_tokenizer(tokenizer_dir)
    train, heldout = (
        [tokenizer.decode(ids[:-1]) for ids in megatron_documents(str(tmp_path / "out0" / f"c-{split}"))[0]]
        for split in ("train", "heldout")
    )
    assert 150 < len(heldout) < 400 and sorted(train + heldout) == sorted(MANY[:2600])
    assert train == [text for text in MANY[:2600] if text in set(train)]  # in the order of the inputs


@pytest.mark.parametrize("count", [2, 5])
def test_shards_hold_each_document_once(tmp_path, options, mixed_inputs, tokenizer_dir, count):
    """With 2 shards of 3 inputs, by input; with 5, by block. In the order of a single run."""
    tokenizer = load_tokenizer(tokenizer_dir)
    texts, sizes = [], []
    for index in range(count):
        made = options(shard=(index, count), block_bytes=500)
        (prefix,) = preprocess(mixed_inputs(), made).manifests
        assert prefix.endswith(f"c-{index:05d}-of-{count:05d}")
        documents, _ = megatron_documents(prefix)
        texts += [tokenizer.decode(ids[:-1]) for ids in documents]
        sizes.append(len(documents))
        manifest = read_manifest(prefix)
        assert manifest is not None and len(manifest.sources) == (3 if count == 5 else 1 + index)
        assert manifest.shard == f"{index}/{count}"
    assert texts == MANY[:2600]
    assert sizes == [1500, 1100] if count == 2 else min(sizes) > 200


def test_the_files_make_a_packed_dataset(tmp_path, options):
    (manifest,) = preprocess(source_of(tmp_path), options()).manifests.values()
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


CHAT = [
    {"role": "user", "content": "the cat <|endoftext|>"},
    {"role": "assistant", "content": "sat on the mat"},
    {"role": "user", "content": "the"},
    {"role": "assistant", "content": "mat"},
]


def chats_of(tmp_path, chats):
    keys = RecordKeys(messages="turns")
    return open_inputs([str(write_lines(tmp_path / "chats.jsonl", chats, "turns"))], keys=keys), keys


def test_chats_are_the_ids_of_the_tokenizers_own_template(tmp_path, options, tokenizer_dir):
    inputs, keys = chats_of(tmp_path, [CHAT, CHAT[:2]])
    preprocess(inputs, options(keys=keys))
    documents, _ = megatron_documents(options().output_prefix)
    tokenizer = load_tokenizer(tokenizer_dir)
    for ids, chat in zip(documents, [CHAT, CHAT[:2]]):
        assert ids == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert 0 in documents[0]  # EOS inside a document is a token like others


def test_chats_without_a_target_are_counted_and_a_corpus_of_them_is_refused(tmp_path, options):
    inputs, keys = chats_of(tmp_path, [CHAT, CHAT[:1], CHAT[:1]])
    marked = options(keys=keys, assistant_loss=True)
    (manifest,) = preprocess(inputs, marked).manifests.values()
    assert (manifest.num_documents, manifest.num_without_targets) == (3, 2)
    inputs, keys = chats_of(tmp_path, [CHAT[:1], CHAT[:1]])
    with pytest.raises(DataError, match="2 chats without a word of the assistant's"):
        preprocess(inputs, options(keys=keys, assistant_loss=True, output_prefix=str(tmp_path / "none" / "c")))
    assert not list((tmp_path / "none").iterdir())


def test_loss_on_assistant_turns_reaches_the_rows(tmp_path, options, tokenizer_dir):
    inputs, keys = chats_of(tmp_path, [CHAT])
    marked = options(keys=keys, assistant_loss=True)
    (manifest,) = preprocess(inputs, marked).manifests.values()
    assert manifest.loss == "assistant"
    assert names_of_output(marked) == ["c.bin", "c.idx", "c.json", "c.loss.bin", "c.loss.idx"]
    plain = options(keys=keys, output_prefix=str(tmp_path / "plain" / "c"))
    preprocess(inputs, plain)
    assert Path(plain.output_prefix + ".bin").read_bytes() == Path(marked.output_prefix + ".bin").read_bytes()
    dataset = PackedDataset([marked.output_prefix], seq_length=128, cycle_length=4, pad_token_id=1, shuffle_seed=None)
    row = dataset[0]
    tokenizer = load_tokenizer(tokenizer_dir)
    targets = row.loss_mask_N == 1
    assert tokenizer.decode(row.labels_N[targets]) == "sat on the mat<|im_end|>mat<|im_end|>"
    # the first target of a turn is predicted at the slot before it, which the assistant did not write
    first = int(np.flatnonzero(targets)[0])
    assert tokenizer.decode(row.tokens_N[: first + 1]).endswith("<|im_start|>assistant\n")


def test_a_chat_that_holds_mask_is_bad(tmp_path, options):
    inputs, keys = chats_of(tmp_path, [CHAT, [{"role": "user", "content": "a <|mask|>"}]])
    with pytest.raises(DataError, match=r"chats.jsonl:2: the control id 2 from the text"):
        preprocess(inputs, options(keys=keys))
    (manifest,) = preprocess(inputs, options(keys=keys, skip_bad=True)).manifests.values()
    assert (manifest.num_documents, manifest.skipped_counts) == (1, {"control token": 1})


def test_a_control_id_that_is_an_ordinary_word_makes_its_documents_bad(tmp_path, options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"cat": 0, "end": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="end", mask_token="?")
    tokenizer.save_pretrained(tmp_path / "words")
    words = options(tokenizer_dir=str(tmp_path / "words"))
    with pytest.raises(DataError, match=r"texts.jsonl:2: the control id 2 from the text 'cat dog'"):
        preprocess(source_of(tmp_path, ["cat cat", "cat dog", "cat"]), words)
    result = preprocess(
        source_of(tmp_path, ["cat cat", "cat dog", "cat"]), options(tokenizer_dir=str(tmp_path / "words"), skip_bad=True)
    )
    assert megatron_documents(words.output_prefix)[0] == [[0, 0, 1], [0, 1]]
    assert next(iter(result.manifests.values())).skipped == ["texts.jsonl:2"]


BAD_LINES = ["{", '{"other": 1}', '{"text": 7}', '{"text": ""}', '{"text": "\\ud800"}', "[]"]


def test_bad_lines_are_refused_or_counted_by_kind_and_named(tmp_path, options):
    path = tmp_path / "bad.jsonl"
    for line in BAD_LINES:
        path.write_text('{"text": "the cat"}\n' + line + "\n")
        with pytest.raises(DataError, match=r"line 2 of .*bad\.jsonl"):
            preprocess(open_inputs([str(path)]), options())
        assert names_of_output(options()) == []
    path.write_bytes("\n".join(['{"text": "the cat"}', *BAD_LINES]).encode() + b'\n{"text": "\xff"}\n{"text": "sat"}')
    (manifest,) = preprocess(open_inputs([str(path)]), options(skip_bad=True)).manifests.values()
    assert manifest.num_documents == 2
    expected = {"empty": 1, "no such key": 1, "not JSON": 2, "not UTF-8": 2, "not a string": 1}
    assert manifest.skipped_counts == expected
    assert manifest.skipped == [f"bad.jsonl:{n}" for n in range(2, 9)]


def test_names_of_documents_left_out_are_kept_up_to_a_thousand_and_all_are_counted(tmp_path, options):
    (manifest,) = preprocess(source_of(tmp_path, [""] * 1500 + ["cat"]), options(skip_bad=True)).manifests.values()
    assert manifest.skipped_counts == {"empty": 1500} and len(manifest.skipped) == 1000


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


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tokenizer_dir": "/absent"}, r"no file .*tokenizer\.json"),
        ({"heldout_fraction": 1.0}, "a held-out fraction of 1.0"),
        ({"mask_token_id": 70}, "MASK id 70, the ordinary token"),
        ({"shard": (2, 2)}, "shard 2/2"),
        ({"num_workers": 0}, "0 workers"),
        ({"assistant_loss": True}, "loss on assistant turns only, of texts"),
    ],
)
def test_what_cannot_work_is_refused_before_any_file_is_touched(tmp_path, options, changes, found):
    with pytest.raises(DataError, match=found):
        preprocess(source_of(tmp_path), options(**changes))
    assert names_of_output(options()) == []


def test_an_output_that_cannot_be_written_is_refused_by_name(tmp_path, options):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/c\.partial: Not a directory"):
        preprocess(source_of(tmp_path), options(output_prefix=str(tmp_path / "file" / "c")))
    with pytest.raises(DataError, match=r"write for example .*/out/corpus"):
        preprocess(source_of(tmp_path), options(output_prefix=str(tmp_path / "out") + "/"))
    assert not (tmp_path / "out").exists()


def test_the_fast_library_cannot_tell_where_tokens_lie(tmp_path, options):
    inputs, keys = chats_of(tmp_path, [CHAT])
    with pytest.raises(DataError, match="--encoder gigatoken with loss on assistant turns only"):
        preprocess(inputs, options(keys=keys, assistant_loss=True, encoder="gigatoken"))
    assert names_of_output(options()) == []


@pytest.mark.parametrize(("texts", "changes"), [(["", ""], {"skip_bad": True}), (TEXTS, {"heldout_fraction": 1e-9})])
def test_a_split_without_text_is_an_error_and_leaves_nothing_behind(tmp_path, options, texts, changes):
    with pytest.raises(DataError, match="no text in the split"):
        preprocess(source_of(tmp_path, texts), options(**changes))
    assert names_of_output(options()) == []


class KilledAt(LinesInput):
    """An input whose process is killed when it asks for block number `last`."""

    last = 0

    def blocks(self, block_bytes):
        for number, block in enumerate(super().blocks(block_bytes)):
            if number == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            yield block


def killed(inputs, options):
    """Run in a child that is killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            preprocess(inputs, options)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("save_seconds", [0, 1000])
def test_a_killed_run_leaves_nothing_that_looks_finished_and_goes_on_to_the_same_bytes(
    tmp_path, options, monkeypatch, save_seconds
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork
    path = write_lines(tmp_path / "texts.jsonl", MANY)
    whole = options(output_prefix=str(tmp_path / "whole" / "c"), block_bytes=3000, heldout_fraction=0.1)
    preprocess(open_inputs([str(path)]), whole)
    made = options(block_bytes=3000, heldout_fraction=0.1, save_seconds=save_seconds)
    for last in (5, 11):  # twice
        source = KilledAt(path, RecordKeys())
        source.last = last
        killed([source], made)
        assert names_of_output(made) == ["c.partial"]
        with pytest.raises(DataError, match="no file"):
            PackedDataset([made.output_prefix + "-train"], seq_length=16, cycle_length=4, pad_token_id=1, shuffle_seed=0)
    said = []
    result = preprocess(open_inputs([str(path)]), made, say=said.append)
    assert result.resumed == (save_seconds == 0)
    assert any("going on with" in line and "after 0 inputs and 11 blocks" in line for line in said) == result.resumed
    assert bytes_of_output(made) == bytes_of_output(whole)


@pytest.mark.parametrize("num_renamed", range(4))
def test_a_run_that_ends_while_files_get_their_names_is_completed_by_the_same_command(
    tmp_path, options, monkeypatch, num_renamed
):
    whole = options(output_prefix=str(tmp_path / "whole" / "c"))
    preprocess(source_of(tmp_path, ["abcd", "ab"]), whole)
    preprocess(source_of(tmp_path, ["ab", "abcd"]), options())
    inputs = source_of(tmp_path, ["abcd", "ab"])  # as many bytes as the old tokens
    rename, renamed = os.replace, []

    def fail_after(source, target):
        if not str(target).endswith("state.json"):
            if len(renamed) == num_renamed:
                raise OSError(errno.EIO, "disk failure")
            renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_after)
    if num_renamed < 3:
        with pytest.raises(OSError, match="disk failure"):
            preprocess(inputs, options(overwrite=True))
        assert names_of_output(options()) == ["c.bin", "c.json", "c.partial"]  # no index: an old one never describes new tokens
        monkeypatch.setattr(os, "replace", rename)
        result = preprocess(inputs, options())  # no --overwrite: these are its own files
        assert result.resumed and result.choice is None
    else:
        preprocess(inputs, options(overwrite=True))
    made, expected = bytes_of_output(options()), bytes_of_output(whole)
    for name in ("c.bin", "c.idx"):
        assert made[name] == expected[name]
    assert sorted(made) == ["c.bin", "c.idx", "c.json"]


def test_an_unfinished_run_of_other_inputs_or_options_is_not_gone_on_with(tmp_path, options):
    inputs = source_of(tmp_path, MANY)
    with Path(inputs[0].name).open("a") as stream:
        stream.write("{\n")
    small = {"block_bytes": 3000, "save_seconds": 0}
    with pytest.raises(DataError, match="line 3001"):
        preprocess(open_inputs([inputs[0].name]), options(**small))
    assert names_of_output(options()) == ["c.partial"]  # what came before the bad line is kept
    with pytest.raises(DataError, match="an unfinished run with another mask id"):
        preprocess(open_inputs([inputs[0].name]), options(**small, mask_token_id=400))
    said = []
    (manifest,) = preprocess(open_inputs([inputs[0].name]), options(**small, skip_bad=True), say=said.append).manifests.values()
    assert "going on with" in said[0] and manifest.num_documents == 3000 and manifest.skipped == ["texts.jsonl:3001"]
    with pytest.raises(DataError, match="line 3001"):
        preprocess(open_inputs([inputs[0].name]), options(**small, overwrite=True))
    preprocess(source_of(tmp_path), options(overwrite=True))  # discards it
    assert len(megatron_documents(options().output_prefix)[0]) == 3 and "c.partial" not in names_of_output(options())


def test_a_full_disk_is_an_error_that_says_how_to_go_on(tmp_path, options):
    """A limit on the size of files stands for the disk: the system call fails alike."""
    generator = random.Random(0)
    path = write_lines(tmp_path / "texts.jsonl", [generator.randbytes(500).hex() for _ in range(300)])
    limited = {"block_bytes": 5000, "save_seconds": 0}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DataError, match="room for the token files"):
            preprocess(open_inputs([str(path)]), options(**limited))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert names_of_output(options()) == ["c.partial"]
    result = preprocess(open_inputs([str(path)]), options(**limited))
    assert result.resumed
    whole = options(output_prefix=str(tmp_path / "whole" / "c"), block_bytes=5000)
    preprocess(open_inputs([str(path)]), whole)
    assert bytes_of_output(options()) == bytes_of_output(whole)


@pytest.mark.multiprocess
def test_the_killed_command_goes_on_to_the_same_bytes_and_leaves_no_process(tmp_path, options, tokenizer_dir):
    generator = random.Random(0)
    path = write_lines(tmp_path / "texts.jsonl", [generator.randbytes(3000).hex() for _ in range(2500)])  # 15 MB: four blocks
    tool = str(Path(__file__).parents[3] / "tools" / "preprocess.py")
    prefix = str(tmp_path / "out" / "c")
    command = [sys.executable, tool, "--input", str(path), "--tokenizer", tokenizer_dir, "--output", prefix, "--no-progress"]
    command += ["--workers", "2", "--save-seconds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "c.partial" / "state.json").exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()
    assert run.stdout is not None
    run.stdout.read()  # ends when no process holds the other end: no worker is left
    run.wait()
    assert names_of_output(options()) == ["c.partial"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    assert "going on with" in again.stdout
    whole = options(output_prefix=str(tmp_path / "whole" / "c"))
    preprocess(open_inputs([str(path)]), whole)
    assert bytes_of_output(options()) == bytes_of_output(whole)
