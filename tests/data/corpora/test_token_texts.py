"""The texts of tokens, one after the other, are the text of the whole."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dmtd.data.corpora.token_texts import token_texts
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, train_bpe


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["the cat sat"] * 3, vocab_size=266, output_dir=folder)
    return load_tokenizer(folder)


def test_characters_of_several_tokens_belong_to_the_last(byte_level):
    ids = byte_level("a 猫 é🙂 cat").input_ids
    texts = token_texts(byte_level, ids)
    assert "".join(texts) == "a 猫 é🙂 cat" and len(texts) == len(ids)
    assert {"猫", "é", "🙂"} <= {text.strip() for text in texts} and "" in texts


def test_bytes_that_are_no_text_stay_visible(byte_level):
    (letter, *_), broken = byte_level("a").input_ids, byte_level("猫").input_ids[:2]
    assert token_texts(byte_level, [letter, *broken, letter, letter]) == ["a", "", "", "�a", "a"]
    assert token_texts(byte_level, [letter, *broken]) == ["a", "", "�"]


def test_spaces_before_words_are_kept_where_a_decoder_strips_the_first():
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert token_texts(tokenizer, [0, 1, 2, 0]) == ["the", " cat", "s", " the"]


def test_nothing_has_no_text(byte_level):
    assert token_texts(byte_level, []) == []
