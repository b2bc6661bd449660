"""Turns of a chat in a request, as a record of a corpus would hold them."""

import pytest
from pydantic import ValidationError

from megatron_dmtd.serving.messages import CacheOfMessages, Message

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}


def as_turn(**fields) -> dict:
    return Message.model_validate(fields).as_turn()


def test_a_message_that_openais_client_has_received_can_be_sent_back():
    received = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert as_turn(**received, tool_calls=None) == {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "absent"])
def test_an_assistant_that_calls_tools_needs_no_content(content):
    assert as_turn(role="assistant", tool_calls=[CALL], **content) == {"role": "assistant", "tool_calls": [CALL]}
    answer = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    assert as_turn(**answer) == answer


@pytest.mark.parametrize("arguments", ["", "{bad", "[1]", "3"])
def test_arguments_that_are_no_object_stay_the_text_that_they_are(arguments):
    (sent,) = as_turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])["tool_calls"]
    assert sent == {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_operations_on_messages_are_empty_unless_they_are_given():
    cache = CacheOfMessages.model_validate({"drop": None, "reposition": None})
    assert (cache.drop, cache.drop_message, cache.reposition) == ({}, None, [])
    assert CacheOfMessages.model_validate({"drop": {"3": [1]}}).drop == {3: [1]}
    with pytest.raises(ValidationError, match="an unknown field after"):
        CacheOfMessages.model_validate({"after": 3})
