import json
import os

import pytest

from megatron_dmtd.chats.turns import Chat
from megatron_dmtd.data.corpora.documents import BadDocument, Document, RecordKeys, in_split, is_heldout, text_document

CHATS = RecordKeys(messages="turns")


def parse(line, keys=None):
    return (keys or RecordKeys()).parse(line if isinstance(line, bytes) else line.encode(), name="a:2", where="line 2 of a")


def test_a_line_with_a_string_is_a_document():
    assert parse('{"id": 8, "text": "one\\u2028"}') == Document(name="a:2", text="one\u2028")
    assert parse('{"content": "one"}', RecordKeys(text="content")) == Document(name="a:2", text="one")


@pytest.mark.parametrize(
    ("line", "kind", "found"),
    [
        ("{", "not JSON", "line 2 of a: Expecting"),
        ("[1]", "not JSON", "line 2 of a: list"),
        ("[" * 100_000, "not JSON", "line 2 of a: maximum recursion"),
        (b'{"text": "\xe9"}', "not UTF-8", "line 2 of a: 'utf-8' codec can't decode byte 0xe9"),
        ('{"id": 1}', "no such key", "keys ['id']"),
        ('{"text": null}', "not a string", "NoneType in an object with the keys ['text']"),
        ('{"text": 7}', "not a string", "int in"),
        ('{"text": ""}', "empty", "line 2 of a: an empty document"),
        ('{"text": "\\ud800"}', "not UTF-8", "half a surrogate pair"),
    ],
)
def test_a_line_without_a_text_says_what_is_wrong_and_where(line, kind, found):
    bad = parse(line)
    assert isinstance(bad, BadDocument)
    assert (bad.name, bad.kind) == ("a:2", kind)
    assert found in bad.found
    assert "--skip-bad" in str(bad.error())


def test_a_line_with_turns_is_a_chat():
    turns = [{"role": "user", "content": "é"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert parse(json.dumps({"turns": turns}), CHATS) == Document(
        name="a:2", chat=Chat(messages=[turns[0], {"role": "assistant", "tool_calls": []}])
    )


@pytest.mark.parametrize(
    ("turns", "kind"),
    [
        ("text", "no chat"),
        ([{"content": "no role"}], "no chat"),
        ([{"role": 7}], "no chat"),
        (["text"], "no chat"),
        ([], "empty"),
        ([{"role": "user", "content": "\ud800"}], "not UTF-8"),
    ],
)
def test_turns_that_are_no_chat_are_bad(turns, kind):
    bad = parse(json.dumps({"turns": turns}), CHATS)
    assert isinstance(bad, BadDocument) and bad.kind == kind and bad.found.startswith("line 2 of a: ")
    assert isinstance(parse('{"text": "one"}', CHATS), BadDocument)


def test_texts_of_one_space_are_documents():
    assert text_document(" ", name="a", where="a") == Document(name="a", text=" ")


NAMES = [f"lib/module_{i}.py" for i in range(4000)]


def test_train_and_heldout_are_disjoint_and_together_all():
    train = {name for name in NAMES if in_split(name, "train", 0.02)}
    heldout = {name for name in NAMES if in_split(name, "heldout", 0.02)}
    assert not train & heldout
    assert train | heldout == {name for name in NAMES if in_split(name, "all", 0.02)} == set(NAMES)
    assert 40 < len(heldout) < 120  # 80 expected


def test_the_split_of_a_name_never_changes():
    assert [name for name in NAMES[:100] if is_heldout(name, 0.05)] == [f"lib/module_{i}.py" for i in (36, 50, 63, 85, 92, 96)]


def test_a_larger_fraction_holds_out_a_superset_and_zero_nothing():
    small, large = ({name for name in NAMES if is_heldout(name, fraction)} for fraction in (0.02, 0.1))
    assert small < large
    assert not any(is_heldout(name, 0.0) for name in NAMES)


def test_a_name_that_is_not_utf8_has_a_split():
    name = os.fsdecode(b"\xff.txt")
    assert is_heldout(name, 1 - 1e-9) and not is_heldout(name, 1e-9)
