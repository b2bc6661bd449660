"""Clients of a replay: a real server and an engine say the same, and what goes wrong has a name."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from transformers import AutoTokenizer

from megatron_dmtd.agents.clients import EngineClient, HTTPClient, counted_by
from megatron_dmtd.agents.policies import RollingDrop, ends_request, standard
from megatron_dmtd.errors import CapabilityError, DataError, DMTDError
from megatron_dmtd.inference import Engine, EngineConfig
from tests.agents.histories import letters
from tests.serving.conftest import serving


def bodies(record, policy):
    messages = record["messages"]
    for number in range(len(messages)):
        if ends_request(messages, number):
            request = policy(messages[: number + 1], letters)
            yield {"messages": request.messages, "max_tokens": 2, "temperature": 0.0, **request.fields}


@pytest.mark.parametrize("policy", [standard(), RollingDrop(keep=3, reposition_tokens=1500)], ids=lambda policy: policy.name)
def test_a_server_and_an_engine_count_the_same(model_folder, record, policy):
    settings = {"max_batch": 1, "cache_tokens": 16_384, "max_length": 8192}
    inside = EngineClient(Engine(model_folder, EngineConfig(**settings), device="cpu"))
    with serving(model_folder, **settings) as served:
        over_http = HTTPClient(base_url=f"{served.url}/v1")
        moved = skipped = 0
        for body in bodies(record, policy):
            one, other = inside.answer(body), over_http.answer(body)
            assert one.usage == other.usage and one.output_tokens == other.output_tokens
            assert 0 < one.first_token_s < 60 and 0 < other.first_token_s < 60 and other.active_tokens is None
            usage = one.usage
            assert (
                usage.cached_tokens + usage.repos_tokens + usage.drop_skipped_tokens + usage.prefill_tokens == usage.prompt_tokens
            )
            assert one.active_tokens <= usage.cached_tokens + usage.repos_tokens + usage.prefill_tokens
            moved, skipped = moved + usage.repos_tokens, skipped + usage.drop_skipped_tokens
    assert (moved > 0) == (skipped > 0) == (policy.name == "rolling_drop")


def test_a_refusal_of_the_server_is_told_in_its_words(model_folder):
    with serving(model_folder, api_key="secret") as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "cache": {"reposition": [3]}}
        with pytest.raises(DataError, match=r"status 400 .*message 3"):
            HTTPClient(base_url=f"{served.url}/v1", api_key="secret").answer(body)
        with pytest.raises(DataError, match="status 401"):
            HTTPClient(base_url=f"{served.url}/v1").answer(body)
        with pytest.raises(DataError, match="status 404"):
            HTTPClient(base_url=f"{served.url}/v1", api_key="secret", model="other").answer({**body, "cache": {}})


def test_an_engines_refusal_is_the_servers(model_folder):
    client = EngineClient(Engine(model_folder, EngineConfig(max_batch=1, cache_tokens=1024), device="cpu"))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "cache": {"drop": {"0": [1]}}}
    with pytest.raises(DMTDError, match="message 1"):
        client.answer(body)


def test_a_tokenizer_counts_contents_and_calls(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    count = counted_by(tokenizer, per_message=3)
    assert count({"role": "user", "content": "hello"}) == 3 + len(tokenizer.encode("hello", add_special_tokens=False))
    call = {"function": {"name": "f", "arguments": "{}"}}
    text = json.dumps(call)
    assert count({"role": "assistant", "content": None, "tool_calls": [call]}) == 3 + len(tokenizer.encode(text))


# Servers of others, and none.


@contextlib.contextmanager
def replying(*replies):
    """A server that gives these replies in turn: a status with its body, or the data of events."""
    left, seen = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, lines = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"".join(lines))

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield HTTPClient(base_url=f"http://127.0.0.1:{server.server_port}/v1", pause_s=0.01), seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*objects):
    return 200, [b": hello\n\n", *(f"data: {json.dumps(one)}\n\n".encode() for one in objects), b"data: [DONE]\n\n"]


TOKEN = {"choices": [{"delta": {"content": "a"}}]}


def test_a_server_without_cache_operations_computes_what_it_has_not_cached():
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}
    with replying(events({"choices": [{"delta": {"role": "assistant"}}]}, TOKEN, {"choices": [], "usage": usage})) as (
        client,
        seen,
    ):
        answer = client.answer({"messages": []})
    assert (answer.usage.cached_tokens, answer.usage.prefill_tokens, answer.output_tokens) == (64, 36, 1)
    assert seen == [{"messages": [], "stream": True, "stream_options": {"include_usage": True}}]


def test_a_server_that_does_not_say_what_was_cached_is_refused():
    for usage in ({"prompt_tokens": 100}, {"prompt_tokens": 100, "prompt_tokens_details": None}, None):
        with (
            replying(events(TOKEN, {"choices": [], "usage": usage})) as (client, _),
            pytest.raises(CapabilityError, match="cached"),
        ):
            client.answer({"messages": []})


def test_a_busy_server_is_asked_again():
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
    busy = (429, [b'{"error": {"message": "busy"}}'])
    with replying(busy, (503, [b""]), events(TOKEN, {"usage": usage})) as (client, seen):
        assert client.answer({}).usage.prefill_tokens == 9 and len(seen) == 3
    with replying(*[busy] * 6) as (client, seen), pytest.raises(DataError, match=r"status 429 .*busy"):
        client.answer({})
    assert len(seen) == 6


def test_an_error_within_a_stream_is_told():
    with (
        replying(events(TOKEN, {"error": {"message": "a step failed"}})) as (client, _),
        pytest.raises(DataError, match="a step failed"),
    ):
        client.answer({})


def test_nobody_who_answers_is_a_message_with_the_address():
    with pytest.raises(CapabilityError, match=r"no answer from http://127.0.0.1:9/v1: .*refused") as caught:
        HTTPClient(base_url="http://127.0.0.1:9/v1").answer({})
    assert "tools/serve.py" in caught.value.remedy
