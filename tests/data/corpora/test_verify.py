import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.batches.manifest import dump_manifest, read_manifest
from megatron_dmtd.data.corpora.documents import RecordKeys
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, train_bpe
from megatron_dmtd.data.corpora.verify import check_one_tokenizer, inspect, verify
from megatron_dmtd.errors import DataError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["the cat sat"] * 3, vocab_size=262, output_dir=folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prefix(tmp_path, tokenizer_dir):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the cat"}\n{"text": "sat"}\n')
    output = str(tmp_path / "c")
    preprocess(open_inputs([str(path)]), PreprocessOptions(tokenizer_dir=tokenizer_dir, output_prefix=output, num_workers=1))
    return output


@pytest.fixture
def chats(tmp_path, tokenizer_dir):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yz"}, {"role": "user", "content": "w"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"turns": turns}) + "\n")
    output, keys = str(tmp_path / "chats"), RecordKeys(messages="turns")
    options = PreprocessOptions(tokenizer_dir=tokenizer_dir, output_prefix=output, num_workers=1, keys=keys, assistant_loss=True)
    preprocess(open_inputs([str(path)], keys=keys), options)
    return output


def edit_manifest(prefix, **changes):
    manifest = read_manifest(prefix)
    assert manifest is not None
    Path(prefix + ".json").write_text(dump_manifest(dataclasses.replace(manifest, **changes)))


def test_a_file_in_order_is_counted(prefix, tokenizer_dir):
    found = verify(prefix, tokenizer_dir=tokenizer_dir)
    manifest = read_manifest(prefix)
    assert manifest is not None and found.manifest == manifest
    assert (found.num_documents, found.num_tokens, found.dtype) == (2, manifest.num_tokens, "uint16")
    assert found.longest > found.shortest >= 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_documents": 3}, "documents 2\nrequired: 3"),
        ({"num_tokens": 9000}, "required: 9000"),
        ({"dtype": "int32"}, "type uint16"),
        ({"max_token_id": 7}, "highest id"),
        ({"bin_sha256": "ab"}, "sha256 of the tokens"),
        ({"mask_token_id": 0}, "the MASK id 0 in"),  # EOS stands for a MASK in the text
    ],
)
def test_what_the_manifest_denies_is_found(prefix, changes, found):
    edit_manifest(prefix, **changes)
    with pytest.raises(DataError, match=found):
        verify(prefix)


def test_another_tokenizer_is_found(prefix, tmp_path):
    train_bpe(["other words"] * 3, vocab_size=262, output_dir=tmp_path / "other")
    with pytest.raises(DataError, match=r"the tokenizer that made .*c: "):
        verify(prefix, tokenizer_dir=str(tmp_path / "other"))
    with pytest.raises(DataError, match="the tokenizer that made"):
        list(inspect(prefix, range(1), tokenizer_dir=str(tmp_path / "other"), cycle_length=4, color=False))


def test_token_files_of_several_tokenizers_are_found(prefix, write_tokens, tmp_path):
    check_one_tokenizer([prefix, write_tokens([[1, 2]], name="foreign")])
    other = str(tmp_path / "other")
    for suffix in (".bin", ".idx", ".json"):
        Path(other + suffix).write_bytes(Path(prefix + suffix).read_bytes())
    edit_manifest(other, tokenizer_sha256="ab" * 32)
    with pytest.raises(DataError, match=r"c of the tokenizer .*other of the tokenizer abababababababab\.\.\."):
        check_one_tokenizer([prefix, other])


def test_negative_ids_and_empty_documents_are_found(write_tokens):
    with pytest.raises(DataError, match="token id -1"):
        verify(write_tokens([[1, -1]], dtype=np.int32))
    empty = write_tokens([[1, 2], []])
    assert verify(empty).shortest == 0  # nothing says that it should not be
    manifest = {"num_documents": 2, "num_tokens": 2, "dtype": "uint16", "max_token_id": 2, "vocab_size": 3, "eos_token_id": 0}
    manifest |= {
        "pad_token_id": 0,
        "mask_token_id": 9,
        "tokenizer_sha256": "",
        "source": "",
        "split": "all",
        "heldout_fraction": 0,
    }
    Path(empty + ".json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="an empty document"):
        verify(empty)


def test_marks_are_verified_too(chats, write_tokens):
    verify(chats)
    marks = Path(chats + ".loss.bin")
    marks.write_bytes(b"\x02" + marks.read_bytes()[1:])
    with pytest.raises(DataError, match="marks above 1"):
        verify(chats)
    tokens = read_manifest(chats).num_tokens
    other = write_tokens([[0] * (tokens - 1)], name="one", dtype=np.uint8)
    for suffix in (".bin", ".idx"):
        Path(chats + ".loss" + suffix).write_bytes(Path(other + suffix).read_bytes())
    with pytest.raises(DataError, match="tokens "):
        verify(chats)


def test_marks_of_other_documents_are_found(tmp_path, write_tokens):
    prefix = write_tokens([[1, 2, 3], [4]])
    write_tokens([[0], [0, 0, 0]], name="corpus.loss", dtype=np.uint8)
    manifest = {"num_documents": 2, "num_tokens": 4, "dtype": "uint16", "max_token_id": 4, "vocab_size": 5, "eos_token_id": 0}
    manifest |= {
        "pad_token_id": 0,
        "mask_token_id": 9,
        "tokenizer_sha256": "",
        "source": "",
        "split": "all",
        "heldout_fraction": 0,
    }
    Path(prefix + ".json").write_text(json.dumps({**manifest, "loss": "assistant"}))
    with pytest.raises(DataError, match="other documents"):
        verify(prefix)


def test_documents_are_shown_with_their_cycles_and_what_carries_no_loss(prefix, chats, tokenizer_dir):
    head, text = inspect(prefix, range(1), tokenizer_dir=tokenizer_dir, cycle_length=2, color=False)
    tokens = read_manifest(prefix)
    assert tokens is not None and head.startswith("document 0: ")
    assert text.replace("|", "").replace("[", "").replace("]", "").removesuffix("<endoftext>") == "the cat"
    assert text.startswith("|[") and text.count("[") == 1
    _, chat = inspect(chats, range(1), tokenizer_dir=tokenizer_dir, cycle_length=1000, color=False)
    assert chat.replace("[", "").replace("]", "") == "|<user>x<assistant>yz<user>w"
    assert chat.endswith("]yz[<][u][s][e][r][>][w]")


def test_on_a_terminal_they_are_coloured(prefix, tokenizer_dir):
    _, text = inspect(prefix, range(1), tokenizer_dir=tokenizer_dir, cycle_length=4, color=True)
    assert text.startswith("\x1b[33m|\x1b[0m\x1b[90m")
