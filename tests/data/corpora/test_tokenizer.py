import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.data.corpora.tokenizer import (
    ControlIds,
    TextEncoder,
    control_ids,
    encoder_json,
    load_tokenizer,
    tokenizer_sha256,
    train_bpe,
    vocabulary_size,
)
from megatron_dmtd.errors import DataError

TEXTS = ["the cat sat on the mat\n", "def f(x):\n    return the_cat(x)\n", "the mask is <|mask|>, the end is <|endoftext|>"] * 5
SPOKEN = "a <|mask|><|pad|> b<|endoftext|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    assert train_bpe(TEXTS, vocab_size=300, output_dir=folder) == 300
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def encoder_of(tokenizer, control=None, *, chats=False):
    return TextEncoder(encoder_json(tokenizer, control or control_ids(tokenizer), chats=chats), chats=chats)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return encoder_of(tokenizer)


def test_a_trained_tokenizer_is_loaded_with_its_control_ids(directory, tokenizer):
    from transformers import AutoTokenizer

    assert control_ids(tokenizer) == ControlIds(eos=0, pad=1, mask=2)
    loaded = AutoTokenizer.from_pretrained(str(directory))
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.mask_token_id) == (0, 1, 2)
    saved = json.loads((directory / "tokenizer_config.json").read_text())
    assert saved["model_input_names"] == ["input_ids", "attention_mask"], "generate(**batch) takes no others"
    assert list(loaded("the cat")) == saved["model_input_names"]
    assert sorted(path.name for path in directory.iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_training_learns_merges_and_is_reproducible(directory, tmp_path, encoder):
    (ids,) = encoder.encode_batch(["the cat"])
    assert len(ids) < 4
    train_bpe(iter(TEXTS), vocab_size=300, output_dir=tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer, encoder, text):
    (ids,) = encoder.encode_batch([text])
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert not np.isin(ids, [0, 1, 2]).any()


def test_text_that_spells_a_control_token_stays_text(tokenizer, encoder):
    assert {0, 1, 2} <= set(tokenizer.encode(SPOKEN))  # the trap: the plain tokenizer turns it into control ids
    (ids,) = encoder.encode_batch([SPOKEN])
    assert not {0, 1, 2} & set(ids.tolist())
    assert tokenizer.decode(ids.tolist()) == SPOKEN
    assert {0, 1, 2} <= set(tokenizer.encode(SPOKEN))  # and the tokenizer itself is left as it was


def add_plain_token(tokenizer_dir, target, content):
    """A copy of the tokenizer with an added token that is not marked special, as Qwen3 has <|fim_middle|>."""
    from tokenizers import AddedToken

    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_tokens([AddedToken(content, special=False, normalized=False)])
    tokenizer.save_pretrained(target)
    return load_tokenizer(target)


def test_a_mask_token_that_is_not_marked_special_cannot_be_spelt_either(directory, tmp_path):
    tokenizer = add_plain_token(directory, tmp_path, "<|fim_middle|>")
    assert 300 in tokenizer.encode("x <|fim_middle|>")
    control = control_ids(tokenizer, mask_token_id=300)
    assert control == ControlIds(eos=0, pad=1, mask=300)
    (ids,) = encoder_of(tokenizer, control).encode_batch(["x <|fim_middle|>"])
    assert 300 not in ids
    assert tokenizer.decode(ids.tolist()) == "x <|fim_middle|>"
    assert vocabulary_size(encoder_json(tokenizer, control, chats=False), control) == 301


def test_for_chats_the_tokens_of_a_template_are_read_as_the_tokenizer_itself_reads_them(tokenizer):
    (ids,) = encoder_of(tokenizer, chats=True).encode_batch([SPOKEN])
    assert ids.tolist() == tokenizer.encode(SPOKEN)
    assert {0, 1, 2} <= set(ids.tolist())


def test_flat_ids_are_the_batch_one_after_the_other(encoder):
    texts = ["the cat", "", "x"]
    flat, lengths = encoder.encode_flat(texts)
    batch = encoder.encode_batch(texts)
    assert flat.tolist() == [i for ids in batch for i in ids.tolist()]
    assert lengths.tolist() == [ids.size for ids in batch] and lengths[1] == 0
    assert [array.size for array in encoder.encode_flat([])] == [0, 0]


def test_each_id_knows_where_in_the_text_it_lies(encoder):
    text = "the cat é x"
    ids, places = encoder.encode_with_places(text)
    starts, ends = places[:, 0], places[:, 1]
    (expected,) = encoder.encode_batch([text])
    assert ids.tolist() == expected.tolist()
    assert starts[0] == 0 and starts[-1] >= text.index("x") - 1 and (np.diff(starts) >= 0).all()
    assert (ends >= starts).all() and ends[-1] == len(text) and encoder.encode_with_places("")[1].shape == (0, 2)


def test_the_vocabulary_of_a_unigram_model_is_counted_by_place():
    model = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 5}]}
    assert vocabulary_size(json.dumps(model), ControlIds(eos=1, pad=1, mask=9)) == 6
    assert vocabulary_size(json.dumps({**model, "added_tokens": []}), ControlIds(eos=0, pad=0, mask=9)) == 2


def test_a_tokenizer_is_known_by_its_file(directory):
    import hashlib

    assert tokenizer_sha256(directory) == hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()


def test_other_added_tokens_keep_their_ids(directory, tmp_path):
    tokenizer = add_plain_token(directory, tmp_path, "<think>")
    (ids,) = encoder_of(tokenizer).encode_batch(["a<think>"])
    assert ids.tolist()[-1] == 300


def test_nothing_is_added_or_cut_off(directory, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=50, pad_id=1, pad_token="<|pad|>")
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", mask_token="<|mask|>")
    assert len(backend.encode("the cat sat").ids) == 50
    (ids,) = encoder_of(tokenizer).encode_batch(["the cat sat on the mat"])
    assert tokenizer.decode(ids.tolist()) == "the cat sat on the mat"


def test_a_mask_id_that_is_eos_or_an_ordinary_token_is_refused(tokenizer):
    assert control_ids(tokenizer, mask_token_id=5000).mask == 5000  # a row of the embedding beyond the tokenizer
    for mask, found in [(0, "MASK id 0, EOS id 0"), (-1, "MASK id -1"), (68, "MASK id 68, the ordinary token 'b'")]:
        with pytest.raises(DataError, match=found):
            control_ids(tokenizer, mask_token_id=mask)


def without(directory, target, key):
    """A copy of the tokenizer whose configuration lacks a key."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config[key]
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    return target


def test_a_tokenizer_without_a_mask_needs_one_by_id(directory, tmp_path):
    tokenizer = load_tokenizer(without(directory, tmp_path, "mask_token"))
    with pytest.raises(DataError, match="without a MASK token"):
        control_ids(tokenizer)
    assert control_ids(tokenizer, mask_token_id=2).mask == 2


def test_a_tokenizer_without_a_pad_pads_with_eos(directory, tmp_path):
    tokenizer = load_tokenizer(without(directory, tmp_path, "pad_token"))
    assert control_ids(tokenizer) == ControlIds(eos=0, pad=0, mask=2)


def test_a_tokenizer_without_eos_is_refused(directory, tmp_path):
    with pytest.raises(DataError, match="has no EOS token"):
        load_tokenizer(without(directory, tmp_path, "eos_token"))


def test_a_missing_tokenizer_is_refused(tmp_path):
    for read in (load_tokenizer, tokenizer_sha256):
        with pytest.raises(DataError, match=r"no file .*tokenizer\.json"):
            read(tmp_path)


def test_a_damaged_tokenizer_is_refused(directory, tmp_path):
    without(directory, tmp_path, "pad_token")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_a_small_corpus_gives_a_smaller_vocabulary(tmp_path):
    assert train_bpe(["ab", "ab"], vocab_size=1000, output_dir=tmp_path / "small") == 260  # 256 bytes, 3 control tokens, "ab"


def test_a_vocabulary_that_cannot_hold_all_bytes_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least 259"):
        train_bpe(TEXTS, vocab_size=258, output_dir=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_training_on_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="no documents"):
        train_bpe([], vocab_size=300, output_dir=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_existing_tokenizer_is_replaced_only_on_demand(tmp_path):
    train_bpe(["ab", "ab"], vocab_size=260, output_dir=tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    before = (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(DataError, match="a tokenizer in "):
        train_bpe(["cd", "cd"], vocab_size=260, output_dir=tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    train_bpe(["cd", "cd"], vocab_size=260, output_dir=tmp_path, overwrite=True)
    assert (tmp_path / "tokenizer.json").read_bytes() != before
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert not list(tmp_path.glob("*partial*"))
