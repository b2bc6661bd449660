"""Text piece by piece against the tokenizer's own decoding of the whole, and stop strings wherever they may fall."""

import random
import time

import pytest

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.detokenizer import MAX_PENDING_TOKENS, Detokenizer, TokenDecoder
from tests.inference.tokenizers_in_memory import byte_level, metaspace

TEXT = "the fox né à 日本 \U0001f642 x"


@pytest.fixture(scope="module")
def bpe() -> TokenDecoder:
    return TokenDecoder(byte_level())


@pytest.fixture(scope="module")
def sentencepiece() -> TokenDecoder:
    return TokenDecoder(metaspace())


@pytest.fixture(params=["bpe", "sentencepiece"])
def decoder(request) -> TokenDecoder:
    return request.getfixturevalue(request.param)


def ids_of(decoder: TokenDecoder, text: str) -> list[int]:
    return decoder.tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces(text: Detokenizer, token_ids: list[int]) -> list[str]:
    """One piece a token until the output ends, at a stop string or with the tokens; then the rest."""
    found = []
    for token_id in token_ids:
        text.add(token_id)
        if text.found_stop:
            break
        found.append(text.take())
    text.finish()
    found.append(text.take())
    assert "".join(found) == text.text
    return found


def until_stop(decoder: TokenDecoder, token_ids: list[int], *stop: str, prompt: tuple[int, ...] = ()) -> tuple[str, int | None]:
    """The text, and how many tokens it took to stop; None if it did not."""
    text = Detokenizer(decoder, prompt, stop)
    given = pieces(text, token_ids)
    return text.text, len(given) if text.found_stop else None


# Text.


def test_pieces_add_up_to_the_text_and_never_split_a_character(decoder):
    ids = ids_of(decoder, TEXT * 20)
    found = pieces(Detokenizer(decoder), ids)
    assert "".join(found) == TEXT * 20 == decoder.tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in found)
    assert found.count("") > 20 * 6, "characters of several tokens are what this is about"


def test_every_cut_between_prompt_and_output_gives_the_text_after_the_prompts(decoder):
    ids = ids_of(decoder, TEXT)
    for cut in range(len(ids)):
        before = "".join(pieces(Detokenizer(decoder), ids[:cut])).rstrip("\ufffd")
        expected = TEXT[len(before) :]
        assert "".join(pieces(Detokenizer(decoder, ids[:cut]), ids[cut:])) == expected, cut


def test_a_sentencepiece_output_begins_with_the_space_that_follows_the_prompt(sentencepiece):
    the, fox = ids_of(sentencepiece, "the fox")
    assert pieces(Detokenizer(sentencepiece, [the]), [fox, the]) == [" fox", " the", ""]
    assert pieces(Detokenizer(sentencepiece), [fox, the]) == ["fox", " the", ""]
    # special tokens are no text: after <s> alone the output is the beginning
    assert pieces(Detokenizer(sentencepiece, [1]), [fox]) == ["fox", ""]
    assert pieces(Detokenizer(sentencepiece, [the, 1, 1, 1, 1, 1]), [fox]) == [" fox", ""]


def test_the_text_before_an_unfinished_character_is_given_at_once(bpe):
    """A token may end inside a character: what is before it waits for nothing."""
    whole = bpe.tokenizer("é", add_special_tokens=False)["input_ids"]
    text = Detokenizer(bpe)
    assert len(whole) > 1 or bpe.tokenizer.decode(whole) == "é"
    first, second = ids_of(bpe, "日")[:2]
    for token_id in (*ids_of(bpe, "x"), first):
        text.add(token_id)
    assert text.take() == "x"
    text.add(second)
    assert text.take() == "" and text.finish() == "x\ufffd" and text.take() == "\ufffd"


def test_an_unfinished_character_is_given_at_the_end_as_the_tokenizer_gives_it(decoder):
    ids = ids_of(decoder, "x日")[:-1]
    assert "".join(pieces(Detokenizer(decoder), ids)) == decoder.tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_of_a_byte_level_tokenizer_are_decoded_as_in_one_go(bpe, seed):
    generator = random.Random(seed)
    ids = [generator.randrange(bpe.tokenizer.vocab_size) for _ in range(200)]
    assert "".join(pieces(Detokenizer(bpe), ids)) == bpe.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("byte", [0xFF, 0xE2, 0xF0, 0x82])
def test_bytes_that_never_make_a_character_are_given_and_cost_the_same_however_many_they_are(decoder, byte):
    name = f"<0x{byte:02X}>" if "<0x00>" in decoder.tokenizer.get_vocab() else bytes_to_symbol(byte)
    token_id = decoder.tokenizer.convert_tokens_to_ids(name)
    text, given, slowest = Detokenizer(decoder), "", 0.0
    for count in range(1, 3000):
        start = time.thread_time()
        text.add(token_id)
        slowest = max(slowest, time.thread_time() - start)
        given += text.take()
        assert count - len(given) <= MAX_PENDING_TOKENS
    assert text.finish() == "\ufffd" * 2999
    assert slowest < 0.02


def bytes_to_symbol(byte: int) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()[byte]


def test_a_character_after_broken_bytes_is_found(decoder):
    broken = ids_of(decoder, "x日")[-3:-1] * 7
    found = "".join(pieces(Detokenizer(decoder), [*broken, *ids_of(decoder, "xyz日")]))
    assert found.endswith("xyz日") and set(found[: -len("xyz日")].rstrip()) == {"\ufffd"}


def test_special_tokens_are_no_text_and_split_none(bpe):
    end = bpe.tokenizer.convert_tokens_to_ids("<|im_end|>")
    think = bpe.tokenizer.convert_tokens_to_ids("<think>")
    ids = ids_of(bpe, "日x")
    mixed = [token for pair in zip(ids, [end] * len(ids)) for token in pair]
    assert "".join(pieces(Detokenizer(bpe), [think, *mixed])) == "<think>日x"
    text = Detokenizer(bpe)
    for _ in range(1000):
        text.add(end)
    assert text.finish() == ""


# Stop strings.


@pytest.mark.parametrize("stop", ["fox", " né", "é à", "é", "本", "日本 ", "\U0001f642", "x", TEXT], ids=repr)
def test_a_stop_string_ends_the_text_before_it_wherever_its_tokens_are_cut(decoder, stop):
    ids = ids_of(decoder, TEXT)
    text, count = until_stop(decoder, ids, "absent", stop)
    assert text == TEXT[: TEXT.index(stop)]
    whole = [len(decoder.tokenizer.decode(ids[:number]).rstrip("\ufffd")) for number in range(1, len(ids) + 1)]
    needed = TEXT.index(stop) + len(stop)
    assert count == next(number for number, length in enumerate(whole, 1) if length >= needed), "neither later nor earlier"


def test_of_two_stop_strings_the_one_that_begins_first_ends_the_text(decoder):
    ids = ids_of(decoder, "the fox")
    assert until_stop(decoder, ids, "x", "ox", "fox", "o")[0] in ("the ", "the f")
    assert until_stop(decoder, ids, "fox", "the fox")[0] == ""
    whole_word = ids_of(decoder, "the quick")
    assert until_stop(decoder, whole_word, "he", "the")[0] == ""


def test_a_stop_string_may_be_a_special_token_or_contain_one(bpe):
    end = bpe.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*ids_of(bpe, "né ab"), end, *ids_of(bpe, "\nx")]
    assert until_stop(bpe, ids, "<|im_end|>") == ("né ab", len(ids_of(bpe, "né ab")) + 1)
    assert until_stop(bpe, ids, "b<|im_end|>")[0] == "né a"
    assert until_stop(bpe, ids, "b<|im_end|>\n")[0] == "né a"
    assert until_stop(bpe, ids, "<|im_end|>\n", "zz")[0] == "né ab"
    assert until_stop(bpe, ids, "<|im_end|>x") == ("né ab\nx", None)
    assert until_stop(bpe, ids, "c<|im_end|>") == ("né ab\nx", None)


def test_a_special_token_of_sentencepiece_stops_too(sentencepiece):
    ids = [*ids_of(sentencepiece, "the fox"), 2, *ids_of(sentencepiece, "the")]
    assert until_stop(sentencepiece, ids, "</s>") == ("the fox", 3)
    assert until_stop(sentencepiece, ids, "</s> the") == ("the fox", 4)


def test_a_special_token_is_found_whole_or_not_at_all(bpe):
    """Its name is no text: strings that are parts of it find nothing there."""
    end = bpe.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*ids_of(bpe, "ab"), end, *ids_of(bpe, "c|")]
    assert until_stop(bpe, ids, "|") == ("abc", len(ids))
    assert until_stop(bpe, ids, "im_end", "<|im_start|>", "end|>c") == ("abc|", None)


def test_letters_that_spell_a_special_token_stop_as_the_token_does(bpe):
    ids = [token for letter in "ab<|im_end|>" for token in bpe.tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert bpe.tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    assert until_stop(bpe, ids, "<|im_end|>") == ("ab", len(ids))


def test_no_stop_string_is_ever_in_the_text_even_around_a_special_token(bpe):
    start, end = bpe.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    for between in (start, end):
        ids = [*ids_of(bpe, "x a"), between, *ids_of(bpe, "b")]
        assert until_stop(bpe, ids, "ab", "zz<|im_end|>") == ("x ", len(ids))


def test_many_special_tokens_in_stop_strings_are_refused(bpe):
    class Many:
        def __init__(self):
            self.added_tokens_decoder, self.all_special_ids = {}, list(range(2049))

        def decode(self, ids, *, skip_special_tokens, **_):
            return "" if skip_special_tokens else f"<{ids[0]}>"

    decoder = TokenDecoder(Many())
    Detokenizer(decoder, (), ["<1>"])
    with pytest.raises(ConfigError, match="name 2049 special tokens"):
        Detokenizer(decoder, (), ["".join(f"<{index}>" for index in range(2049))])


def test_what_may_begin_a_stop_string_is_held_back_and_no_more(bpe):
    text = Detokenizer(bpe, (), ["foxes", "<|im_end|>"])
    given = pieces(text, [token for letter in "ab fox foxy <|im" for token in ids_of(bpe, letter)])
    assert "".join(given) == "ab fox foxy <|im" and len([piece for piece in given if piece]) > 3
    assert "".join(given[:-1]) == "ab fox foxy <|im"[:-9]


def test_a_stop_string_that_the_last_token_leaves_undecided_is_found_at_the_end(sentencepiece):
    """A run of bytes that is not complete hides the character before it; at the end it is decided."""
    ids = ids_of(sentencepiece, "x日本")[:-1]
    text = Detokenizer(sentencepiece, (), ["\ufffd"])
    for token_id in ids:
        text.add(token_id)
    assert not text.found_stop
    assert text.finish() == "x日" and text.found_stop
