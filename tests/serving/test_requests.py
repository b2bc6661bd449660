"""Fields: what is taken, what asks for nothing, and what is refused with its name."""

import time

import pytest

from megatron_dmtd.serving.faults import RequestError
from megatron_dmtd.serving.requests import ChatRequest, CompletionRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}


def completion(**fields) -> CompletionRequest:
    return CompletionRequest.taken_from({"prompt": "a", **fields})


def chat(*messages, **fields) -> ChatRequest:
    return ChatRequest.taken_from({"messages": list(messages), **fields})


def user(**fields) -> dict:
    return {"role": "user", "content": "a", **fields}


def test_whole_numbers_may_be_written_with_a_point():
    body = completion(prompt=[[1.0, 2], [3]], n=2.0, max_tokens=5.0, top_k=1e2, seed=-3.0, logprobs=1.0, stop_token_ids=[4.0])
    found = [*body.prompts[0], body.n, body.max_tokens, body.top_k, body.seed, body.logprobs, *body.stop_token_ids]
    assert found == [1, 2, 2, 5, 100, -3, 1, 4] and {type(value) for value in found} == {int}
    assert chat(user(), top_logprobs=0.0, max_completion_tokens=7.0).most_tokens == 7


REFUSED = {
    "mixed prompt": ({"prompt": [1, "a"]}, "prompt", "lists of token ids"),
    "empty list": ({"prompt": []}, "prompt", "no list empty"),
    "empty ids": ({"prompt": [[1], []]}, "prompt", "no list empty"),
    "true as an id": ({"prompt": [True]}, "prompt", "token ids"),
    "fraction as an id": ({"prompt": [1.5]}, "prompt", "token ids"),
    "null prompt": ({"prompt": None}, "prompt", "Field required"),
    "text as a number": ({"n": "1"}, "n", "valid integer"),
    "true as a number": ({"max_tokens": True}, "max_tokens", "valid integer"),
    "number as a text": ({"model": 1}, "model", "valid string"),
    "text as a flag": ({"stream": "yes"}, "stream", "valid boolean"),
    "flag as logprobs": ({"logprobs": True}, "logprobs", "valid integer"),
    "many logprobs": ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    "a long stop string": ({"stop": "x" * 1001}, "stop", "at most 1000 characters"),
    "many stop strings": ({"stop": ["x"] * 65}, "stop", "at most 64"),
    "a number as stop string": ({"stop": ["x", 3]}, "stop.1", "valid string"),
    "an empty stop string": ({"stop": ["x", ""]}, "stop.1", "at least 1 character"),
    "many stop ids": ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
    "large bias": ({"logit_bias": {str(index): 1 for index in range(1025)}}, "logit_bias", "at most 1024"),
    "bias for a word": ({"logit_bias": {"a": 1}}, "logit_bias", "not 1 for 'a'"),
    "bias for -1": ({"logit_bias": {"-1": 1}}, "logit_bias", "for '-1'"),
    "bias in quotes": ({"logit_bias": {"5": "-inf"}}, "logit_bias", "not '-inf'"),
    "large seed": ({"seed": 2**63}, "seed", "less than"),
    "usage without stream": ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "should be false",
    ),
    "unknown option": ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "an unknown field usage"),
    "echoed stream": ({"echo": True, "stream": True}, "echo", "echo with stream"),
    "best_of": ({"best_of": 2}, "best_of", "best_of = 2"),
    "best_of as a flag": ({"best_of": True}, "best_of", "best_of = True"),
    "field of chats": ({"messages": []}, "messages", "an unknown field messages"),
    "misspelled": ({"tempature": 1}, "tempature", "closest: temperature"),
}


@pytest.mark.parametrize(("fields", "param", "found"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_field_at_fault(fields, param, found):
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert found in refused.value.found and refused.value.param == param


REFUSED_CHATS = {
    "unknown role": ([{"role": "wizard", "content": "a"}], {}, "messages.0.role", "'assistant' or 'tool'"),
    "no role": ([user(), {"content": "a"}], {}, "messages.1.role", "Field required"),
    "no content": ([{"role": "user"}], {}, "messages.0", "content is required"),
    "null content": ([user(), {"role": "assistant", "content": None}], {}, "messages.1", "content is required"),
    "calls of a user": ([user(tool_calls=[CALL])], {}, "messages.0", "only an assistant"),
    "no calls": ([{"role": "assistant", "content": None, "tool_calls": []}], {}, "messages.0", "content is required"),
    "a number as content": ([user(content=3)], {}, "messages.0.content", "Input should be a valid"),
    "no parts": ([user(content=[])], {}, "messages.0.content", "at least 1 item"),
    "a picture": ([user(content=[{"type": "image_url", "image_url": {}}])], {}, "messages.0.content.0", "only text is taken"),
    "half a part": ([user(content=[{"type": "text"}])], {}, "messages.0.content.0.text", "Field required"),
    "a bad call": (
        [{"role": "assistant", "tool_calls": [{"type": "function"}]}],
        {},
        "messages.0.tool_calls.0.function",
        "required",
    ),
    "old calls": ([user(function_call={"name": "f"})], {}, "messages", "a message's function_call"),
    "a message that is none": ([7], {}, "messages.0", "valid dictionary"),
    "no messages": ([], {}, "messages", "at least 1 item"),
    "many messages": ([user()] * 4097, {}, "messages", "at most 4096"),
    "top_logprobs": ([user()], {"top_logprobs": 3}, "top_logprobs", "top_logprobs without logprobs"),
    "two lengths": ([user()], {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "that differ"),
    "tools": ([user()], {"tools": [{}]}, "tools", "tools = [{}]"),
    "a field of texts": ([user()], {"echo": True}, "echo", "an unknown field echo"),
}


@pytest.mark.parametrize(("messages", "fields", "param", "found"), REFUSED_CHATS.values(), ids=REFUSED_CHATS)
def test_a_chat_that_cannot_be_is_refused_with_the_field_at_fault(messages, fields, param, found):
    with pytest.raises(RequestError) as refused:
        chat(*messages, **fields)
    assert found in refused.value.found and refused.value.param == param


def test_what_asks_for_nothing_is_taken():
    silent = {"n": None, "user": "me", "metadata": {"a": [1]}, "best_of": 1, "suffix": "", "tools": [], "tool_choice": "none"}
    silent |= {"stream_options": {"include_usage": False, "include_obfuscation": None}, "response_format": {"type": "text"}}
    silent |= {"unknown": None, "stop": None, "logit_bias": {}}
    assert completion(**silent, stream=False).n == 1
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    body = chat(user(content=parts, cache_control={}, name="me"), stream=True, stream_options={"include_obfuscation": False})
    assert body.messages[0].as_turn() == {
        "role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"
    }  # fmt: skip


def test_a_route_calls_the_engines_parameters_by_its_own_names():
    assert completion().name_of("max_new_tokens") == "max_tokens" and completion().name_of("prompt_logprobs") == "logprobs"
    assert chat(user()).name_of("max_new_tokens") == "max_tokens" and chat(user()).name_of("logprobs") == "top_logprobs"
    assert chat(user(), max_completion_tokens=3).name_of("max_new_tokens") == "max_completion_tokens"
    assert completion().name_of("top_p") == "top_p"


@pytest.mark.parametrize(
    "fields",
    [
        {f"a{index}": 1 for index in range(100_000)},
        {"prompt": [1] * 300_000 + ["x"]},
        {"stop": [3] * 300_000},
        {"stop_token_ids": ["x"] * 300_000},
        {"stream_options": {f"a{index}": 1 for index in range(100_000)}},
        {"logit_bias": {f"a{index}": 1 for index in range(100_000)}},
    ],
    ids=["names", "ids", "stop strings", "stop ids", "options", "bias"],
)
def test_a_hundred_thousand_faults_are_refused_as_fast_as_one_and_in_few_words(fields):
    start = time.thread_time()
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert time.thread_time() - start < 0.3
    assert len(str(refused.value)) < 1000
