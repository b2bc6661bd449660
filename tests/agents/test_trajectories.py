"""Recorded trajectories: read as requests, or refused by line."""

import json

import pytest

from megatron_dmtd.agents.trajectories import read_trajectories, write_trajectories
from megatron_dmtd.errors import DataError
from tests.agents.histories import call, history

SYSTEM, USER, DONE = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "d"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call(0), call(1)]}


def answer(number):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": "a"}


def test_a_file_is_read_as_it_was_written_and_blank_lines_do_not_matter(tmp_path):
    path = tmp_path / "runs.jsonl"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    records = [{"id": "first", "messages": history([1, 2]), "tools": tools}, {"messages": [USER, DONE]}]
    write_trajectories(path, records)
    path.write_text(path.read_text() + "\n" + json.dumps([SYSTEM, USER]) + "\n")
    first, second, third = read_trajectories(path)
    assert (first.name, second.name, third.name) == ("first", "2", "4")
    assert first.messages == history([1, 2]) and first.body(sends_tools=True) == {"tools": tools}
    assert first.body(sends_tools=False) == second.body(sends_tools=True) == {}
    assert third.messages == [SYSTEM, USER]


def test_a_request_ends_before_each_turn_of_the_assistant_and_at_an_open_end(tmp_path):
    path = tmp_path / "runs.jsonl"
    write_trajectories(path, [{"messages": history([1, 2])}, {"messages": history([1])[:-1]}])
    first, second = read_trajectories(path)
    assert first.turns == [2, 4, 7] and second.turns == [2, 4]


def test_values_for_the_template_are_sent(tmp_path):
    path = tmp_path / "runs.jsonl"
    write_trajectories(path, [{"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}])
    assert read_trajectories(path)[0].body(sends_tools=False) == {"chat_template_kwargs": {"enable_thinking": False}}


def test_a_mark_stands_before_the_first_text_and_changes_nothing_else(tmp_path):
    path = tmp_path / "runs.jsonl"
    parts = {"role": "user", "content": [{"type": "text", "text": "u"}]}
    write_trajectories(path, [{"messages": [SYSTEM, USER, DONE]}, {"messages": [parts]}])
    texts, in_parts = read_trajectories(path)
    marked = texts.marked("[1]")
    assert marked.messages == [{"role": "system", "content": "[1]\ns"}, USER, DONE] and texts.messages[0] == SYSTEM
    assert [part["text"] for part in in_parts.marked("[1]").messages[0]["content"]] == ["[1]\n", "u"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "no JSON"),
        ("3", "'3' is neither a list"),
        ('{"turns": []}', "neither a list nor an object with messages"),
        ("[]", "messages is \\[\\], not a list of turns"),
        ([{"role": "user"}], "messages\\[0\\] has the role 'user', or no content"),
        ([SYSTEM], "a system message alone"),
        ([DONE, USER], "messages\\[0\\] has the role 'assistant'"),
        ([USER, {"role": "function", "content": "x"}], "messages\\[1\\] has the role 'function'"),
        ([USER, answer(0)], "messages\\[1\\] is a tool response, but no turn"),
        ([USER, DONE, answer(0)], "messages\\[2\\] is a tool response, but no turn"),
        ([USER, CALLS, answer(0), USER, answer(1)], "messages\\[3\\] comes before the call 'call_1'"),
        ([USER, CALLS, answer(0), answer(0)], "messages\\[3\\] answers the call 'call_0', which is not open"),
        ([USER, CALLS, answer(7)], "messages\\[2\\] answers the call 'call_7', which is not open"),
        ([USER, CALLS, answer(0), DONE], "messages\\[3\\] comes before the call 'call_1'"),
        ([USER, {"role": "assistant", "reasoning": "hm"}], "messages\\[1\\] has no content and calls no tool"),
        ([USER, CALLS, {"role": "tool", "tool_call_id": "call_0", "content": {"a": 1}}], "messages\\[2\\].content is neither"),
        ([USER, {"role": "assistant", "content": [{"type": "image_url"}]}], "messages\\[1\\].content\\[0\\] is"),
        ({"messages": [USER], "documents": [{"title": "t"}]}, "documents has no place"),
        ({"messages": [USER], "id": [1]}, "the id \\[1\\]"),
        ({"messages": [USER], "id": "1"}, "a second trajectory with the id '1'"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_line(tmp_path, line, found):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps([USER]) + "\n\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(DataError, match=f"runs.jsonl, line 3: .*{found}") as caught:
        read_trajectories(path)
    assert "line 3" in caught.value.remedy and "OpenAI messages" in caught.value.required


def test_files_that_cannot_be_read_and_empty_ones_are_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_trajectories(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="a readable file in UTF-8"):
        read_trajectories(tmp_path / "bytes")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DataError, match="no trajectories"):
        read_trajectories(tmp_path / "empty")
