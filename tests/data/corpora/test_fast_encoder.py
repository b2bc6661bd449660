"""The fast encoder against `tokenizers`, which it must equal or not be used."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dmtd.data.corpora import fast_encoder
from megatron_dmtd.data.corpora.fast_encoder import (
    FastEncoder,
    check_equal,
    choose_encoder,
    fast_model,
    make_encoder,
    probes,
    resident_bytes,
)
from megatron_dmtd.data.corpora.tokenizer import TextEncoder, control_ids, encoder_json, load_tokenizer, train_bpe
from megatron_dmtd.errors import CapabilityError, DataError

TEXTS = ["the cat sat on the mat\n", "def f(x):\n    return x\n", "<|mask|> <|endoftext|> <think> é e\u0301", "", " "]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE with an added token that texts may hold, and special ones that they may not."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS * 3, vocab_size=300, output_dir=folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def json_of(tokenizer, *, chats=False):
    return encoder_json(tokenizer, control_ids(tokenizer), chats=chats)


def with_normalizer(tokenizer_json, normalizer):
    return json.dumps({**json.loads(tokenizer_json), "normalizer": normalizer})


NFC = {"type": "NFC"}


@pytest.fixture(
    scope="module",
    params=[(False, None), (True, None), (False, NFC), (True, NFC)],
    ids=["texts", "chats", "NFC texts", "NFC chats"],
)
def pair(request, tokenizer):
    """The fast and the reference encoder of texts and of chats, without and with a normalizer."""
    chats, normalizer = request.param
    text = with_normalizer(json_of(tokenizer, chats=chats), normalizer)
    return FastEncoder(text, chats=chats), TextEncoder(text, chats=chats)


def assert_equal(pair, texts):
    fast, reference = pair
    for got, want in zip(fast.encode_flat(texts), reference.encode_flat(texts)):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=st.lists(st.text() | st.sampled_from([*TEXTS, "e\u0301", "<think>\u0338", "\u07eb\u07fd\u07f3"]), max_size=5))
def test_ids_are_equal_on_any_text(pair, texts):
    assert_equal(pair, texts)


def test_ids_are_equal_on_the_probes_which_spell_every_added_token(tokenizer, pair):
    texts = probes(json_of(tokenizer))
    assert sum("<think>" in text for text in texts) == 1 and sum("<|mask|>" in text for text in texts) == 1
    assert_equal(pair, texts)


def test_documents_that_normalising_changes_keep_their_places_among_the_others(pair):
    assert_equal(pair, ["e\u0301", "the", "cat", "e\u0301", "sat", "x\u0323\u0301 the"])
    assert_equal(pair, ["e\u0301"])
    # with an added token in them, which is found before its neighbours are normalised
    assert_equal(pair, ["the", "<think>\u0338 e\u0301", "cat", "e\u0301", "e\u0301<think>", "<think\u003e", "sat"])
    assert_equal(pair, ["e\u0301<think>"])


def test_the_order_of_rare_marks_is_that_of_tokenizers(tokenizer):
    """gigatoken 0.10 alone orders N'Ko marks otherwise: found in real text."""
    import gigatoken

    text = with_normalizer(json_of(tokenizer), NFC)
    words = "\u07eb\u07fd\u07f3"
    (want,) = TextEncoder(text).encode_batch([words])
    assert gigatoken.Tokenizer.from_json(text).encode(words).tolist() != want.tolist(), "they agree by now"
    assert FastEncoder(text).encode_flat([words])[0].tolist() == want.tolist()


def test_a_normalizer_that_is_not_known_to_be_the_same_is_left_to_tokenizers(tokenizer):
    both = {"type": "Sequence", "normalizers": [NFC, NFC]}
    assert choose_encoder(with_normalizer(json_of(tokenizer), both), TEXTS).name == "gigatoken"
    choice = choose_encoder(with_normalizer(json_of(tokenizer), {"type": "NFKC"}), TEXTS)
    assert choice.name == "tokenizers" and "its normalizer is NFKC, only NFC is known to be the same" in choice.reason


def test_probes_show_every_character_that_tables_may_not_know(tokenizer):
    shown = set("".join(probes(json_of(tokenizer))))
    assert {"\u07fd", "\u0967", "\U0001e900", "\u3000", "中"} <= shown | {"中"} and len(shown) > 70_000


def test_special_tokens_stay_text_and_other_added_tokens_are_read(tokenizer):
    flat, lengths = FastEncoder(json_of(tokenizer)).encode_flat(["a<|mask|><|endoftext|>", "a<think>"])
    ids = np.split(flat, np.cumsum(lengths)[:-1])
    assert not {0, 1, 2} & set(ids[0].tolist())
    assert ids[1].tolist()[-1] == 300


def test_the_fast_encoder_is_chosen_where_its_ids_are_equal(tokenizer):
    choice = choose_encoder(json_of(tokenizer), TEXTS)
    assert choice.name == "gigatoken"
    assert f"equal those of tokenizers on {len(''.join(TEXTS).encode())} bytes" in choice.reason
    assert isinstance(make_encoder("gigatoken", json_of(tokenizer), chats=False), FastEncoder)


def test_tokenizers_is_taken_when_asked_for(tokenizer):
    assert choose_encoder(json_of(tokenizer), TEXTS, wanted="tokenizers").name == "tokenizers"
    assert isinstance(make_encoder("tokenizers", json_of(tokenizer), chats=False), TextEncoder)


def word_level():
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<mask>": 1, "cat": 2}, unk_token="cat"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", mask_token="<mask>")


def test_a_tokenizer_that_it_does_not_support_falls_back_and_says_why():
    choice = choose_encoder(json_of(word_level()), ["cat"])
    assert choice.name == "tokenizers" and "gigatoken does not support this tokenizer" in choice.reason
    with pytest.raises(CapabilityError, match="does not support"):
        choose_encoder(json_of(word_level()), ["cat"], wanted="gigatoken")


def test_a_tokenizer_that_it_reads_differently_falls_back_and_names_a_text(tokenizer):
    model = json.loads(json_of(tokenizer))
    model["added_tokens"][-1]["single_word"] = True  # gigatoken 0.10 reads <think> inside words all the same
    text = json.dumps(model)
    (want,) = TextEncoder(text).encode_batch(["a<think>b"])
    got, _ = FastEncoder(text).encode_flat(["a<think>b"])
    assert want.tolist() != got.tolist(), "they agree by now: this test needs another difference"
    choice = choose_encoder(text, TEXTS)
    assert choice.name == "tokenizers" and "gives other ids than tokenizers for 'a<think>b" in choice.reason


def test_without_the_package_tokenizers_is_taken(tokenizer, monkeypatch):
    monkeypatch.delitem(sys.modules, "gigatoken", raising=False)
    monkeypatch.setattr(sys, "meta_path", [])  # nothing can be found any more
    choice = choose_encoder(json_of(tokenizer), TEXTS)
    assert (choice.name, choice.reason) == ("tokenizers", "gigatoken is not installed")


def test_a_difference_found_during_the_run_is_an_error(tokenizer):
    reference = TextEncoder(json_of(tokenizer))
    (ids,) = reference.encode_batch(["the cat"])
    check_equal(reference, "the cat", ids, where="a:1")
    with pytest.raises(DataError, match=r"a:1: gigatoken's ids differ"):
        check_equal(reference, "the cat", ids[::-1], where="a:1")


def test_a_model_made_once_is_all_that_a_worker_loads(tokenizer):
    text = json_of(tokenizer)
    choice = choose_encoder(text, TEXTS)
    assert choice.model == fast_model(text, chats=False) and not choice.model.is_normalizing
    encoder = make_encoder("gigatoken", text, chats=False, model=choice.model)
    assert_equal((encoder, TextEncoder(text)), TEXTS)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of a process so cheaply")
def test_an_encoder_that_knows_too_many_words_forgets_them_and_encodes_as_before(tokenizer):
    text = json_of(tokenizer)
    encoder, reference = FastEncoder(text), TextEncoder(text)
    first = encoder._tokenizer
    encoder.encode_flat(TEXTS)
    assert encoder._tokenizer is first
    held = bytearray(fast_encoder.MAX_CACHE_BYTES + (64 << 20))  # the process grows, as if by words
    assert_equal((encoder, reference), TEXTS)
    assert encoder._tokenizer is not first and resident_bytes() > len(held)
    second = encoder._tokenizer
    assert_equal((encoder, reference), TEXTS)
    assert encoder._tokenizer is second  # counted again from where it was loaded
