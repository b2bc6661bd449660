"""What a body may be before anything of it is looked at: size, time, type, JSON, characters."""

import asyncio
import json
import time

import pytest
from fastapi import Request

from megatron_dmtd.serving import bodies
from megatron_dmtd.serving.bodies import MAX_CONTAINERS, parsed, read_body
from megatron_dmtd.serving.faults import BodyTimeoutError, BodyTooLargeError, MediaTypeError, RequestError


def request_of(chunks: list[bytes], content_type: str | None = "application/json", *, delay_s: float = 0.0) -> Request:
    """A request whose body comes in chunks."""
    left = list(chunks)

    async def receive() -> dict:
        await asyncio.sleep(delay_s)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    return Request({"type": "http", "headers": headers}, receive)


def read(*arguments, **options) -> bytes:
    return asyncio.run(read_body(request_of(*arguments), **{"max_bytes": 10, **options}))


def test_a_body_is_read_whole_up_to_the_limit():
    assert read([b"12345", b"67890"]) == b"1234567890"
    assert read([b"{}"], "Application/JSON; charset=utf-8") == read([b"{}"], "application/problem+json") == b"{}"


def test_a_body_beyond_the_limit_is_refused_and_not_kept(monkeypatch):
    with pytest.raises(BodyTooLargeError, match="found: a body of 11 bytes\nrequired: at most 10"):
        read([b"12345", b"678901"])
    monkeypatch.setattr(bodies, "MAX_DROPPED_BYTES", 100)
    chunks = [b"x" * 60] * 3
    with pytest.raises(BodyTooLargeError, match="a body of at least 120 bytes"):
        read(chunks)


def test_a_body_that_does_not_come_is_given_up():
    with pytest.raises(BodyTimeoutError, match=r"found: 0 bytes of a body after 0.01 s"):
        asyncio.run(read_body(request_of([b"1", b"2"], delay_s=1.0), max_bytes=10, timeout_s=0.01))


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_that_is_not_said_to_be_json_is_refused(content_type):
    with pytest.raises(MediaTypeError, match="required: application/json"):
        read([b"{}"], content_type)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "no JSON, at character 0"),
        (b"{bad", "no JSON, at character 1"),
        (b'{"a": 1}}', "no JSON, at character 8: Extra data"),
        (b"[]", "no JSON object"),
        (b'"text"', "no JSON object"),
        (b"null", "no JSON object"),
        ("{'a': 'é'}".encode("latin-1"), "not UTF-8 at 7"),
        (json.dumps({"a": 1}).encode("utf-16"), "not UTF-8 at 0"),
        (b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON: Exceeds the limit"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"a": [' + b"[]," * MAX_CONTAINERS + b"1]}", f"a body of {MAX_CONTAINERS + 2} lists and objects"),
    ],
)
def test_what_is_no_json_object_is_refused(body, found):
    with pytest.raises(RequestError) as refused:
        parsed(body)
    assert found in refused.value.found and refused.value.status == 400


def test_brackets_in_texts_are_no_lists():
    text = '[{"a": "\\\\"}]' * MAX_CONTAINERS
    assert parsed(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    most = {"a": [[]] * (MAX_CONTAINERS - 2)}
    assert parsed(json.dumps(most).encode()) == most


@pytest.mark.parametrize(
    "body", [b'"' + b'\\"' * 500_000, b'"' * 1_000_001, b'{"a":"' + b"\\" * 1_000_001, b"[" * 40_000 + b'"\\']
)
def test_brackets_are_counted_in_no_more_time_than_it_takes_to_read(body):
    start = time.thread_time()
    with pytest.raises(RequestError):
        parsed(b"[{" * MAX_CONTAINERS + body)
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": "a\\ud800"}', "prompt"),
        (b'{"prompt": "\\ude42\\ud83d"}', "prompt"),
        (b'{"n": 1, "messages": [{"role": "user", "content": "\\uDfff"}]}', "messages"),
        (b'{"messages": [{"\\udabc": 1}]}', "messages"),
    ],
)
def test_half_a_character_is_refused_wherever_it_is(body, name):
    with pytest.raises(RequestError, match="half of a surrogate pair") as refused:
        parsed(body)
    assert refused.value.param == name


def test_half_a_character_in_a_name_is_refused_in_words_that_can_be_sent():
    with pytest.raises(RequestError) as refused:
        parsed(b'{"\\ud800": 1}')
    assert str(refused.value).encode("utf-8") and "\\ud800" in refused.value.found and refused.value.param is None


def test_whole_characters_are_taken_however_they_are_written():
    text = "é 日 \U0001f642 \x00"
    for body in (json.dumps({"a": text}), json.dumps({"a": text}, ensure_ascii=False)):
        assert parsed(body.encode()) == {"a": text}
    assert parsed(b'{"a": "\\\\ud800"}') == {"a": "\\ud800"}
