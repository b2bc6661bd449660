"""All shards of a source, joined, are the bytes of a single run; anything else is refused before a byte is written."""

import dataclasses
import gzip
import json
import os
import signal
from pathlib import Path

import pytest

from megatron_dmtd.data.batches.manifest import dump_manifest, manifest_path, read_manifest
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora import merge as room
from megatron_dmtd.data.corpora.documents import RecordKeys
from megatron_dmtd.data.corpora.merge import merge
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.errors import DataError
from tests.support.tokenizers import chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["x = 1234567890"], vocab_size=270)


@pytest.fixture
def source(tmp_path):
    """Five inputs of several kinds and very different sizes, with bad documents among them."""
    lines = [json.dumps({"text": f"x = {i}" if i % 100 else ""}) + "\n" for i in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(lines[:1500]))
    (tmp_path / "b.jsonl").write_text("".join(lines[1500:1510]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[1510:2800]).encode()))
    (tmp_path / "d.jsonl").write_text("".join(lines[2800:]))
    (tmp_path / "texts").mkdir()
    for i in range(100):
        (tmp_path / "texts" / f"{i:03d}.txt").write_text(f"y = {i}" if i != 7 else "")
    return [str(tmp_path / "*.jsonl*"), str(tmp_path / "texts")]


@pytest.fixture
def options(tokenizer_dir, tmp_path):
    def make(**changes):
        given = {"tokenizer_dir": tokenizer_dir, "output_prefix": str(tmp_path / "out" / "c"), "num_workers": 1}
        return PreprocessOptions(**{**given, "block_bytes": 2000, "skip_bad": True, **changes})

    return make


def shards(names, options, count, **changes):
    """Make all shards; their prefixes, by split."""
    prefixes = {}
    for index in range(count):
        made = options(shard=(index, count), **changes)
        preprocess(open_inputs(names), made)
        for split, prefix in made.outputs().items():
            prefixes.setdefault(split, []).append(prefix)
    return prefixes


def files_of(prefix):
    folder, name = Path(prefix).parent, Path(prefix).name
    return {path.name.removeprefix(name): path.read_bytes() for path in folder.glob(f"{name}.*") if path.is_file()}


@pytest.mark.parametrize("count", [2, 4, 5, 7])
def test_merged_shards_are_a_single_run_byte_for_byte(tmp_path, source, options, count):
    """With up to 5 shards of 5 inputs, by input; with 7, by block. The manifest, too, is that of the single run."""
    whole = options(output_prefix=str(tmp_path / "whole" / "c"), heldout_fraction=0.2)
    preprocess(open_inputs(source), whole)
    for split, prefixes in shards(source, options, count, heldout_fraction=0.2).items():
        expected = files_of(whole.outputs()[split])
        assert sorted(expected) == [".bin", ".idx", ".json"]
        merged = str(tmp_path / f"merged-{split}")
        manifest = merge(merged, prefixes[::-1], chunk_tokens=500)
        assert files_of(merged) == expected
        assert manifest == read_manifest(merged) and manifest.skipped_counts == {"empty": 31} and len(manifest.sources) == 5


def test_loss_marks_are_merged_too(tmp_path, options):
    chats = [[{"role": "user", "content": f"x = {i}"}, {"role": "assistant", "content": f"{i} = x"}] for i in range(200)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"turns": chat}) + "\n" for chat in chats))
    keys = RecordKeys(messages="turns")
    whole = options(output_prefix=str(tmp_path / "whole" / "c"), keys=keys, assistant_loss=True)
    preprocess(open_inputs([str(path)], keys=keys), whole)
    prefixes = []
    for index in range(3):
        made = options(shard=(index, 3), keys=keys, assistant_loss=True)
        prefixes += preprocess(open_inputs([str(path)], keys=keys), made).manifests
    merge(str(tmp_path / "merged"), prefixes, chunk_tokens=300)
    assert files_of(str(tmp_path / "merged")) == files_of(whole.output_prefix)
    assert sorted(files_of(whole.output_prefix)) == [".bin", ".idx", ".json", ".loss.bin", ".loss.idx"]


def test_more_than_a_thousand_names_of_bad_documents_are_cut_as_in_a_single_run(tmp_path, options):
    for name, count in (("a", 700), ("b", 800)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": ""}\n' * count + '{"text": "x"}\n')
    names = [str(tmp_path / "*.jsonl")]
    whole = options(output_prefix=str(tmp_path / "whole" / "c"))
    preprocess(open_inputs(names), whole)
    manifest = merge(str(tmp_path / "merged"), shards(names, options, 2)["all"])
    assert manifest == read_manifest(whole.output_prefix)
    assert (len(manifest.skipped), manifest.skipped[-1], manifest.skipped_counts) == (1000, "b.jsonl:300", {"empty": 1500})


@pytest.fixture
def prefixes(source, options):
    return shards(source, options, 3)["all"]


def change_manifest(prefix, **changes):
    manifest_path(prefix).write_text(dump_manifest(dataclasses.replace(read_manifest(prefix), **changes)))


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ([0, 2], "no shard 1 of 3"),
        ([0, 1], "no shard 2 of 3"),
        ([0, 1, 1, 2], "shard 1 more than once"),
        ([0, 0, 2], "no shard 1 of 3; shard 0 more than once"),
    ],
)
def test_gaps_and_overlaps_are_refused(tmp_path, prefixes, chosen, found):
    with pytest.raises(DataError, match=found):
        merge(str(tmp_path / "merged"), [prefixes[index] for index in chosen])
    assert not files_of(str(tmp_path / "merged"))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tokenizer_sha256": "ab"}, "another tokenizer than"),
        ({"mask_token_id": 9}, "another MASK id than"),
        ({"heldout_fraction": 0.1}, "another held-out fraction than"),
        ({"source": "key 'text' of z.jsonl"}, "another source than"),
        ({"source_sha256": "ab"}, "another size of an input than"),
        ({"block_bytes": 4}, "another size of blocks than"),
        ({"shard": "1/4"}, "shards of 3 and of 4"),
        ({"first_source": 9}, "inputs .* missing"),
        ({"num_tokens": 9}, "as its manifest says"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(tmp_path, prefixes, changes, found):
    change_manifest(prefixes[1], **changes)
    with pytest.raises(DataError, match=found):
        merge(str(tmp_path / "merged"), prefixes)
    assert not files_of(str(tmp_path / "merged"))


def test_an_input_that_changed_between_two_shards_that_read_it_is_refused(tmp_path, options):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"x = {i:04d}"}) + "\n" for i in range(1000)))
    made = []
    for index in range(2):
        made += preprocess(open_inputs([str(path)]), options(shard=(index, 2))).manifests
        path.write_text(path.read_text().replace("x =", "z ="))  # as many bytes
    with pytest.raises(DataError, match=r"a\.jsonl changed"):
        merge(str(tmp_path / "merged"), made)


def test_a_damaged_or_unfinished_shard_is_refused(tmp_path, prefixes):
    tokens = Path(prefixes[2] + ".bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2] + b"\x05\x00")
    with pytest.raises(DataError, match="sha256 of the tokens"):
        merge(str(tmp_path / "merged"), prefixes)
    tokens.write_bytes(whole)
    index = Path(prefixes[2] + ".idx")
    index.rename(tmp_path / "index")
    with pytest.raises(DataError, match=r"no file .*c-00002-of-00003\.idx"):
        merge(str(tmp_path / "merged"), prefixes)
    (tmp_path / "index").rename(index)
    manifest_path(prefixes[0]).unlink()
    with pytest.raises(DataError, match=r"no manifest .*c-00000-of-00003\.json"):
        merge(str(tmp_path / "merged"), prefixes)


def test_shards_dealt_out_by_block_cannot_be_joined(tmp_path, prefixes):
    for prefix in prefixes:
        change_manifest(prefix, order="blocks")
    with pytest.raises(DataError, match="every 3th block of an input of unknown size"):
        merge(str(tmp_path / "merged"), prefixes)


def test_an_existing_file_is_replaced_only_on_demand_and_a_shard_never(tmp_path, prefixes):
    merged = str(tmp_path / "merged")
    merge(merged, prefixes)
    with pytest.raises(DataError, match=r"merged\.bin.* already there"):
        merge(merged, prefixes)
    Path(merged + ".bin").write_bytes(b"")
    merge(merged, prefixes, overwrite=True)
    assert TokenFile(merged).num_tokens == sum(TokenFile(prefix).num_tokens for prefix in prefixes)
    with pytest.raises(DataError, match="as shard and output"):
        merge(prefixes[0], prefixes, overwrite=True)


def test_a_killed_merge_leaves_nothing_that_looks_finished_and_goes_on_to_the_same_bytes(tmp_path, prefixes, monkeypatch):
    expected = str(tmp_path / "expected")
    merge(expected, prefixes, chunk_tokens=300)
    merged = str(tmp_path / "merged")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        drawn = room._chunks

        def killed(part, chunk_tokens):
            for number, chunk in enumerate(drawn(part, chunk_tokens)):
                if (part.index, number) == (2, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                yield chunk

        room._chunks = killed
        merge(merged, prefixes, chunk_tokens=300, save_seconds=0)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not files_of(merged).keys() & {".bin", ".idx", ".json"}
    state = json.loads((tmp_path / "merged.partial" / "state.json").read_text())
    assert (state["input"], state["block"]) == (2, 3)
    copied = []
    monkeypatch.setattr(
        room, "_chunks", lambda part, size, chunks=room._chunks: (copied.append(part.index), chunks(part, size))[1]
    )
    merge(merged, prefixes, chunk_tokens=300)
    assert copied == [2], "the others were there already"
    assert files_of(merged) == files_of(expected)
