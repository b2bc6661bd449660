"""Records as chats: what is kept, and what is refused by its place."""

import datetime
import decimal

import pytest

from megatron_dmtd.chats.turns import Chat, ChatError, read_chat, texts_of
from tests.chats.records import WEATHER, assistant, call, user


def read(*messages, **fields):
    return read_chat({"messages": list(messages), **fields}, "messages")


def test_everything_that_may_decide_the_text_is_kept_and_nulls_of_turns_are_not():
    turn = assistant(None, tool_calls=[{**call("f", {"a": None}), "id": None}], name=None, reasoning="hm", odd={"x": [None]})
    chat = read(user("hi"), turn, tools=[WEATHER], chat_template_kwargs={"enable_thinking": False}, documents=None, id=7)
    kept = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    assert chat == Chat(
        messages=[user("hi"), {"role": "assistant", "tool_calls": [kept], "reasoning": "hm", "odd": {"x": [None]}}],
        tools=[WEATHER],
        values={"enable_thinking": False},
    )


def test_parts_lose_hints_and_nulls_and_nothing_else():
    part = {"type": "text", "text": "hi", "image_url": None, "cache_control": {"type": "ephemeral"}}
    assert read(user([part, "yes"])).messages[0]["content"] == [{"type": "text", "text": "hi"}, {"type": "text", "text": "yes"}]


def test_the_names_of_other_data_sets_are_understood():
    chat = read_chat(
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes", "weight": 1}]}, "conversations"
    )
    assert chat.messages == [user("hi"), {**assistant("yes"), "weight": 1}]


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("hi", r"messages\[0\] is \"hi\", not an object"),
        ({"content": "hi"}, r"messages\[0\] has the role null"),
        ({"role": 7, "content": "hi"}, r"messages\[0\] has the role 7"),
        ({"role": "user", "text": "hi"}, r"messages\[0\] has no content: its fields are \['role', 'text'\]"),
        (user(7), r"messages\[0\]\.content is 7, neither a text nor a list of parts"),
        (user({"a": 1}), r"messages\[0\]\.content is \{\"a\": 1\}, neither"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), r"messages\[0\]\.content\[0\] is .*only text is supported"),
        (user([{"type": "text"}]), r"content\[0\] is .*only text"),
        (user([{"type": "text", "text": "a", "citations": [1]}]), r"content\[0\] has the field 'citations'"),
        (user([7]), r"content\[0\] is 7, and only text"),
        (assistant("", tool_calls="f"), r"messages\[0\]\.tool_calls is \"f\", not a list"),
        (assistant("", tool_calls=["f"]), r"tool_calls\[0\] is \"f\", not an object"),
        (assistant("", tool_calls=[{"function": "f"}]), r"tool_calls\[0\]\.function is \"f\""),
        (assistant("", tool_calls=[{"function": {}}]), r"tool_calls\[0\] has the name null"),
        (assistant("", tool_calls=[call("f", [1])]), r"tool_calls\[0\] has the arguments \[1\]"),
        (
            assistant("", tool_calls=[call("f", {"at": datetime.date(2026, 1, 2)})]),
            r"arguments\.at is a date \(2026-01-02\), which JSON",
        ),
        (assistant("", tool_calls=[call("f", {"at": [decimal.Decimal(1)]})]), r"arguments\.at\[0\] is a Decimal"),
        (assistant("", tool_calls=[call("f", {1: 2})]), r"arguments has the name 1, not a text"),
        (user(b"hi"), r"messages\[0\]\.content is a bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(message, found):
    with pytest.raises(ChatError, match=found):
        read(message)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"tools": "weather"}, 'tools is "weather", not a list'),
        ({"tools": [7]}, r"tools\[0\] is 7, not an object"),
        ({"tools": {"a": 1}}, "tools is .*not a list"),
        ({"functions": [{"name": "f"}]}, "field 'functions' would not reach the chat template: write them as `tools`"),
        ({"system": "be brief"}, "field 'system' would not reach .* as the first turn"),
        ({"chat_template": "{{ 1 }}"}, "field 'chat_template'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs is"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is"),
        ({"messages": "hi"}, 'messages is "hi", not a list of turns'),
        ({"messages": []}, r"messages is \[\], not a list"),
    ],
)
def test_fields_of_a_record_reach_the_template_or_are_refused(fields, found):
    with pytest.raises(ChatError, match=found):
        read(user("hi"), **fields)
    assert read(user("hi"), functions=None, system="", tools=None).tools is None


def test_what_is_nested_too_deeply_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatError, match="nested too deeply"):
        read(user("hi"), chat_template_kwargs={"x": deep})
    while deep:  # or Python's own destructor would recurse
        deep = deep[0]


def test_all_strings_of_a_value_are_found():
    assert texts_of({"a": ["b", {"c": 1, "d": None}], "e": "f"}) == ["a", "b", "c", "d", "e", "f"]
