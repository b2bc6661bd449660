"""The classes of all characters: decided for each, kept on disk, and told apart where libraries do not agree."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.data.corpora import code_points
from megatron_dmtd.data.corpora.code_points import (
    UnknownWordsError,
    all_code_points,
    as_ranges,
    doubtful_code_points,
    find_doubtful,
    reference_classes,
)
from megatron_dmtd.data.corpora.fast_encoder import FastEncoder
from megatron_dmtd.data.corpora.tokenizer import TextEncoder, control_ids, encoder_json, load_tokenizer, train_bpe

WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(expression: str) -> dict:
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    one = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [one, bytes_only]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["it's we're don't a's b's the cat's 1's\n"] * 5, vocab_size=290, output_dir=folder)
    tokenizer = load_tokenizer(folder)
    return encoder_json(tokenizer, control_ids(tokenizer), chats=False)


@pytest.fixture(scope="module")
def doubtful(texts) -> list[str]:
    """Expanded."""
    ranges = eval(f'"{doubtful_code_points(texts)}"').split("-")
    joined = "-".join(ranges)
    return [chr(code) for first, last in zip(joined[::3], joined[2::3]) for code in range(ord(first), ord(last) + 1)]


def ids(encoder, text):
    return encoder.encode_flat([text])[0].tolist()


def test_every_code_point_but_halves_of_pairs_is_decided():
    codes = all_code_points()
    assert codes.size == 0x110000 - 0x800 and 0xD7FF in codes and 0xD800 not in codes and 0xDFFF not in codes
    assert codes[-1] == 0x10FFFF and (np.diff(codes.astype(np.int64)) > 0).all()


def test_classes_of_the_reference_are_those_of_its_expressions():
    codes = np.array([ord(char) for char in "aéaA中1²٣ \u3000!\u0301ſſ\u0378"], dtype=np.uint32)
    numbers = dict(zip(map(chr, codes.tolist()), reference_classes(split(QWEN), codes).tolist()))
    assert numbers["é"] == numbers["中"] and numbers["²"] == numbers["٣"], "letters, and numbers"
    assert numbers["\u0301"] == numbers["\u0378"], "neither letter nor number nor space: a mark, and what is no character yet"
    assert len({numbers[char] for char in "é²\u3000\u0301ſ"}) == 5, "a long s is an s in either case"
    assert len({numbers[char] for char in "aA1! "}) == 5


def test_words_that_do_not_depend_on_characters_leave_nothing_in_doubt():
    for words in (None, {"type": "Metaspace"}, {**WORDS, "use_regex": False}):
        assert find_doubtful(words).size == 0


def test_words_of_unknown_kinds_are_refused():
    with pytest.raises(UnknownWordsError, match="BertPreTokenizer"):
        find_doubtful({"type": "BertPreTokenizer"})
    with pytest.raises(UnknownWordsError, match="brackets in brackets"):
        find_doubtful(split(r"[\p{L}&&[a-z]]+"))


def test_letters_newer_than_the_fast_librarys_tables_are_doubtful(texts, doubtful):
    """U+088F became a letter in Unicode 17, U+10940 as well."""
    assert {"\u088f", "\U00010940"} <= set(doubtful) and "é" not in doubtful and "中" not in doubtful
    assert 1000 < len(doubtful) < 20_000


def test_ids_of_texts_with_any_of_them_are_those_of_the_reference(texts, doubtful):
    import gigatoken

    fast, reference, alone = FastEncoder(texts), TextEncoder(texts), gigatoken.Tokenizer.from_json(texts)
    several = [f"it{char}'s {char}a the{char} 1{char}\n" for char in random.Random(0).sample(doubtful, 300)]
    wrong = [text for text in several if alone.encode(text).tolist() != ids(reference, text)]
    assert len(wrong) > 100, "gigatoken alone gives the same ids by now"
    assert [ids(fast, text) for text in several] == [ids(reference, text) for text in several]


#: every plane, marks, joiners, what comes before contractions
_CHARS = st.characters(exclude_categories=["Cs"]) | st.sampled_from(
    "\u0301\u200d\u200c\ufe0f\u088f\u0c5c\U00010940\u017f\u212a'’"
)
_TEXTS = st.lists(
    st.text(_CHARS, max_size=4) | st.sampled_from(["'s", "'S ", " ", "a", "1", "\n", "don't", "!!", "👩‍👩‍👧"]), max_size=8
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(parts=_TEXTS, plane=st.integers(0, 16), offset=st.integers(0, 0xFFFD))
def test_ids_are_those_of_the_reference_on_any_text(texts, parts, plane, offset):
    code = plane * 0x10000 + offset
    char = "" if 0xD800 <= code < 0xE000 else chr(code)
    fast, reference = _encoders(texts)
    for text in ("".join(parts), f"{char}'s".join(parts), f"a{char}'s {char}1{char}!{char}"):
        assert ids(fast, text) == ids(reference, text), ascii(text)


def _encoders(texts, made={}):  # noqa: B006 - once
    if texts not in made:
        made[texts] = FastEncoder(texts), TextEncoder(texts)
    return made[texts]


def test_what_was_decided_is_kept_and_damage_or_another_version_decides_again(texts, tmp_path, monkeypatch):
    asked = []

    def find(words):
        asked.append(words)
        return np.array([0x88F, 0x890, 0x10940], dtype=np.uint32)

    monkeypatch.setattr(code_points, "find_doubtful", find)
    wanted = r"\U0000088f-\U00000890\U00010940-\U00010940"
    assert [doubtful_code_points(texts, cache=tmp_path) for _ in range(3)] == [wanted] * 3 and asked == [WORDS]
    (path,) = tmp_path.iterdir()
    for damaged in ("", "[]", json.dumps({**json.loads(path.read_text()), "doubtful": "a-b"})):
        path.write_text(damaged)
        assert doubtful_code_points(texts, cache=tmp_path) == wanted
    assert len(asked) == 4
    monkeypatch.setattr(code_points, "_VERSION", 0)
    assert doubtful_code_points(texts, cache=tmp_path) == wanted and len(asked) == 5
    (tmp_path / "file").touch()
    assert doubtful_code_points(texts, cache=tmp_path / "file") == wanted, "a cache that cannot be written is done without"


def test_a_difference_of_one_character_is_found(monkeypatch):
    """A fault is planted: the fast library cuts one letter like a number."""
    real = code_points._FastCuts.of

    def faulty(self, codes):
        cuts = real(self, codes).copy()
        cuts[codes == ord("\u0416")] = cuts[codes == ord("\u0663")]
        return cuts

    few = np.array([*range(0x400, 0x480), *range(0x660, 0x66A), ord("a")], dtype=np.uint32)
    monkeypatch.setattr(code_points, "all_code_points", lambda: few)
    assert find_doubtful(WORDS).size == 0
    monkeypatch.setattr(code_points._FastCuts, "of", faulty)
    assert find_doubtful(WORDS).tolist() == [0x416]


def test_ranges_are_the_inside_of_a_bracket():
    assert as_ranges(np.array([], dtype=np.uint32)) == ""
    assert as_ranges(np.array([0x2D, 0x5D], dtype=np.uint32)) == r"\U0000002d-\U0000002d\U0000005d-\U0000005d"
