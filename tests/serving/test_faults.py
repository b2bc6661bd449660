"""Refusals as OpenAI's clients read them."""

import json

import pytest

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.serving.faults import (
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
    OutOfServiceError,
    OverloadError,
    RequestError,
    UnknownModelError,
    error_response,
    refusal,
)

WORDS = {"found": "a", "required": "b", "remedy": "c"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (RequestError(**WORDS, param="n", code="x"), 400, "invalid_request_error", {}),
        (ConfigError(**WORDS), 400, "invalid_request_error", {}),
        (DataError(**WORDS), 400, "invalid_request_error", {}),
        (UnknownModelError(**WORDS), 404, "invalid_request_error", {}),
        (BodyTimeoutError(**WORDS), 408, "invalid_request_error", {"connection": "close"}),
        (BodyTooLargeError(**WORDS), 413, "invalid_request_error", {"connection": "close"}),
        (MediaTypeError(**WORDS), 415, "invalid_request_error", {}),
        (OverloadError(**WORDS), 429, "overloaded", {"retry-after": "1"}),
        (OutOfServiceError(**WORDS), 503, "server_error", {"retry-after": "1"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_kind_of_refusal_has_its_status_and_says_what_to_do(error, status, kind, headers):
    answer = refusal(error)
    assert answer.status_code == status and headers.items() <= dict(answer.headers).items()
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    found = json.loads(answer.body)["error"]
    assert found["message"] == "found: a\nrequired: b\nremedy: c" and found["type"] == kind
    assert (found["param"], found["code"]) == (("n", "x") if status == 400 and type(error) is RequestError else (None, None))


def test_words_with_half_a_character_can_be_sent():
    answer = error_response(400, "a\ud800b", kind="x", headers={"Allow": "GET"})
    assert json.loads(answer.body)["error"]["message"] == "a\\ud800b" and answer.headers["allow"] == "GET"
