"""Answers to OpenAI's own client are the engine's, whatever else is asked for at the same time."""

import concurrent.futures
import json
import math
import socket

import httpx
import openai
import pytest

from megatron_dmtd.inference import Engine, SamplingParams, score
from megatron_dmtd.inference.detokenizer import Detokenizer, TokenDecoder
from megatron_dmtd.inference.text import load_tokenizer
from tests.serving.conftest import CHAT_TEMPLATE, VARIED, serving

PROMPTS = ["ab", "x", "the quick brown fox", "é", "0123456789" * 5, "def f():"]


def from_engine(folder, prompt: str, length: int, **params) -> list[int]:
    ids = load_tokenizer(folder)(prompt)["input_ids"]
    engine = Engine(folder, device="cpu")
    (completion,) = engine.generate([ids], max_new_tokens=length, params=SamplingParams(repetition_penalty=5.0, **params))
    return list(completion.token_ids)


def as_text(folder, prompt: str, token_ids: list[int]) -> str:
    tokenizer = load_tokenizer(folder)
    text = Detokenizer(TokenDecoder(tokenizer), tokenizer(prompt)["input_ids"])
    for token_id in token_ids:
        text.add(token_id)
    return text.finish()


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, str]:
    return {prompt: as_text(folder, prompt, from_engine(folder, prompt, 21)) for prompt in PROMPTS}


def text_of(client, prompt: str, **options) -> str:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=21, extra_body=VARIED, **options)
    return answer.choices[0].text


def streamed(client, prompt: str) -> str:
    chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=21, extra_body=VARIED, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_a_text_is_completed_as_the_engine_completes_it(served, expected):
    answer = served.client.completions.create(model="tiny", prompt="ab", max_tokens=21, extra_body=VARIED)
    assert answer.choices[0].text == expected["ab"] and len(set(expected["ab"])) > 4
    assert answer.choices[0].finish_reason == "length" and answer.model == "tiny" and answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 21, 23)


def test_requests_at_once_streamed_or_not_get_what_each_gets_alone(served, expected):
    client, jobs = served.client, [(ask, prompt) for _ in range(4) for prompt in PROMPTS for ask in (text_of, streamed)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda job: job[0](client, job[1]), jobs))
    assert found == [expected[prompt] for _, prompt in jobs]
    assert served.worker.engine.stats.num_parallel_passes < served.worker.engine.stats.num_steps
    served.until_idle()


def test_a_list_of_prompts_and_samples_are_numbered_in_order(served, expected):
    answer = served.client.completions.create(model="tiny", prompt=PROMPTS, n=2, max_tokens=21, extra_body=VARIED)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(PROMPTS)))
    assert [choice.text for choice in answer.choices] == [expected[prompt] for prompt in PROMPTS for _ in range(2)]


def test_token_ids_are_prompts_too(served, expected, folder):
    ids = load_tokenizer(folder)("ab")["input_ids"]
    for prompt in (ids, [ids]):
        answer = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=21, extra_body=VARIED)
        assert answer.choices[0].text == expected["ab"]


def test_a_stop_string_ends_the_text_before_it_and_is_never_streamed(served, expected):
    stop = expected["ab"][5:8]
    before = expected["ab"][: expected["ab"].index(stop)]
    answer = served.client.completions.create(model="tiny", prompt="ab", max_tokens=21, stop=[stop, "\0\0"], extra_body=VARIED)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
    chunks = list(served.client.completions.create(model="tiny", prompt="ab", stop=stop, stream=True, extra_body=VARIED))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_seeds_repeat_and_without_one_samples_differ(served):
    def sampled(seed):
        return text_of(served.client, "ab", temperature=1.5, seed=seed)

    assert sampled(3) == sampled(3)
    assert len({sampled(None) for _ in range(4)}) > 1


def test_logprobs_are_the_engines_and_offsets_point_into_the_text(served, folder, expected):
    answer = served.client.completions.create(model="tiny", prompt="ab", max_tokens=21, logprobs=2, extra_body=VARIED)
    given = answer.choices[0].logprobs
    ids = load_tokenizer(folder)("ab")["input_ids"]
    params = SamplingParams(repetition_penalty=5.0, logprobs=2)
    (completion,) = Engine(folder, device="cpu").generate([ids], max_new_tokens=21, params=params)
    assert given.token_logprobs == pytest.approx([choice.logprob for choice in completion.logprobs], abs=1e-5)
    assert all(1 <= len(top) <= 2 for top in given.top_logprobs) and math.isfinite(sum(given.token_logprobs))
    assert given.text_offset[0] == 0 and given.text_offset == sorted(given.text_offset)
    whole = [index for index, token in enumerate(given.tokens) if "\ufffd" not in token]
    assert len(whole) > 3
    for index in whole:  # bytes that make no character come with the next one that is whole
        begin, token = given.text_offset[index], given.tokens[index]
        shared = given.text_offset[: index + 1].count(begin) - 1
        assert token in expected["ab"][begin : begin + shared + len(token)], (index, begin, token)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echo_tells_how_likely_the_prompt_is(served, folder, max_tokens):
    text = "some longer text, é"
    ids = load_tokenizer(folder)(text)["input_ids"]
    answer = served.client.completions.create(
        model="tiny", prompt=[text, "ab"], max_tokens=max_tokens, echo=True, logprobs=1, n=2, extra_body=VARIED
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage.completion_tokens == 4 * max_tokens
    for choice in answer.choices[:2]:
        given = choice.logprobs
        assert choice.text.startswith(text) and choice.finish_reason == "length"
        assert len(given.tokens) == len(ids) + max_tokens and given.text_offset[:6] == [0, 1, 2, 3, 4, 5]
        assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
        expected = score(Engine(folder, device="cpu"), ids)
        assert given.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-5)
        assert all(max(top.values()) >= logprob for top, logprob in zip(given.top_logprobs[1:], given.token_logprobs[1:]))
    echoed = served.client.completions.create(model="tiny", prompt=ids, max_tokens=max_tokens or 1, echo=True)
    assert echoed.choices[0].text.startswith(text) and echoed.choices[0].logprobs is None


def test_usage_ends_a_stream_that_asks_for_it(served):
    chunks = list(
        served.client.completions.create(
            model="tiny", prompt="ab", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 5)


@pytest.fixture(scope="module")
def chat(folder, tmp_path_factory):
    """The same model with a chat template."""
    copy = tmp_path_factory.mktemp("chat") / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with serving(copy) as served:
        yield served


def test_a_chat_is_the_completion_of_its_template(chat, folder):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]
    prompt = "<user>hi<assistant>yo<assistant>"
    expected = as_text(folder, prompt, from_engine(folder, prompt, 12))
    options = {"model": "tiny", "messages": messages, "max_completion_tokens": 12, "extra_body": VARIED}
    answer = chat.client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == expected and answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    assert len(answer.choices[0].logprobs.content) == 12 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 1
    chunks = list(chat.client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_length_goes_as_far_as_there_is_room(chat):
    messages = [{"role": "user", "content": "a" * 480}]
    answer = chat.client.chat.completions.create(model="tiny", messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


def test_messages_that_the_template_refuses_and_parts_that_are_no_text_are_refused(chat, served):
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="text"):
        chat.client.chat.completions.create(model="tiny", messages=picture)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])


REFUSED = {
    "tools": ({"tools": [{}]}, 400, r"found: tools = .*remedy: drop tools"),
    "echo": ({"echo": True, "stream": True}, 400, "found: echo with stream"),
    "unknown": ({"tempature": 1}, 400, "an unknown field tempature; closest: temperature"),
    "type": ({"n": "many"}, 400, "n: Input should be a valid integer"),
    "probability": ({"top_p": 7}, 400, "top_p=7"),
    "length": ({"max_tokens": 5000}, 400, "at most 512 tokens together"),
    "nothing": ({"max_tokens": 0}, 400, "found: max_tokens=0"),
    "suffix": ({"suffix": "b"}, 400, "found: suffix = 'b'"),
    "ids": ({"prompt": [1, 999]}, 400, r"token ids \[999\]"),
    "empty": ({"prompt": ""}, 400, "an empty prompt"),
    "no prompt": ({"prompt": None}, 400, "prompt: Field required"),
    "bias": ({"logit_bias": {"999": 1}}, 400, "logit_bias"),
    "model": ({"model": "gpt"}, 404, "found: model 'gpt'"),
}


@pytest.mark.parametrize(("fields", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_by_name(served, fields, status, message):
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "ab", **fields})
    assert answer.status_code == status
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.json()["error"]["message"].replace("\n", " "))


PARAMS = {
    "length": ("completions", {"max_tokens": 5000}, "max_tokens"),
    "nothing": ("completions", {"max_tokens": 0}, "max_tokens"),
    "long prompt": ("completions", {"prompt": "a" * 600}, "prompt"),
    "ids": ("completions", {"prompt": [999]}, "prompt"),
    "sampling": ("completions", {"top_p": 7}, "top_p"),
    "type": ("completions", {"n": "many"}, "n"),
    "unknown": ("completions", {"tempature": 1}, "tempature"),
    "half a character": ("completions", {"prompt": "\ud800"}, "prompt"),
    "model": ("completions", {"model": "\ud83d\ude42"}, "model"),
    "chat's length": ("chat/completions", {"max_completion_tokens": 5000}, "max_completion_tokens"),
    "chat's old length": ("chat/completions", {"max_tokens": 5000}, "max_tokens"),
    "role": ("chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    "half a character of a chat": ("chat/completions", {"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    "long chat": ("chat/completions", {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    "template": (
        "chat/completions",
        {"chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs.tools",
    ),
    "tops": ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
}


@pytest.mark.parametrize(("route", "fields", "param"), PARAMS.values(), ids=PARAMS)
def test_a_refusal_names_the_field_as_the_client_wrote_it(chat, route, fields, param):
    own = {"prompt": "ab"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({**own, **fields})
    answer = httpx.post(f"{chat.url}/v1/{route}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and "max_new_tokens" not in error["message"]


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-30, 1e-38, 1e-45, 5e-324])
def test_a_temperature_of_nearly_nothing_is_greedy(served, expected, temperature):
    assert text_of(served.client, "ab", temperature=temperature) == expected["ab"]


def test_bodies_that_are_too_large_or_no_json_have_their_own_statuses(served):
    large = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a" * 2**20})
    assert large.status_code == 413 and "at most 1048576" in large.json()["error"]["message"]
    assert large.headers["connection"] == "close"
    form = httpx.post(f"{served.url}/v1/completions", data={"prompt": "ab"})
    assert form.status_code == 415 and "application/json" in form.json()["error"]["message"]
    with serving(served.worker.engine.model.directory, max_body_bytes=30) as small:
        assert httpx.post(f"{small.url}/v1/completions", json={"prompt": "ab"}).status_code == 200
        assert httpx.post(f"{small.url}/v1/completions", json={"prompt": "ab" * 10}).status_code == 413


def test_a_client_that_goes_before_it_has_sent_all_leaves_no_word_in_the_log(served, caplog):
    host, port = served.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head + b"{")
    lines: list[str] = []
    while not any('status="499"' in line for line in lines):
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    assert caplog.records == []


def test_what_a_stopped_output_holds_is_the_same_whole_streamed_and_from_the_engine(served, folder, expected):
    stop = expected["ab"][5:8]
    params = {"model": "tiny", "prompt": "ab", "max_tokens": 21, "stop": [stop, "<eos>"], "extra_body": VARIED}
    whole = served.client.completions.create(**params)
    chunks = list(served.client.completions.create(**params, stream=True))
    engine = Engine(folder, device="cpu")
    ids = load_tokenizer(folder)("ab")["input_ids"]
    sampling = SamplingParams(repetition_penalty=5.0, stop=(stop, "<eos>"))
    (completion,) = engine.generate([ids], max_new_tokens=21, params=sampling)
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == completion.text
    assert whole.usage.completion_tokens == len(completion.token_ids) < 21


def test_a_refused_prompt_of_a_list_takes_the_others_with_it_and_leaves_nothing_behind(served):
    with pytest.raises(openai.BadRequestError, match="an empty prompt"):
        served.client.completions.create(model="tiny", prompt=["ab", "x", ""], max_tokens=400)
    served.until_idle(5)


def test_fields_that_ask_for_nothing_are_taken(served):
    fields = {"prompt": "ab", "user": "me", "best_of": 1, "echo": False, "suffix": None, "n": None, "seed": None}
    assert httpx.post(f"{served.url}/v1/completions", json=fields).status_code == 200


def test_a_body_that_is_no_json_and_an_address_that_is_none(served):
    answer = httpx.post(f"{served.url}/v1/completions", content=b"{bad", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "no JSON, at character 1" in answer.json()["error"]["message"]
    assert httpx.get(f"{served.url}/v2").json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405


def test_the_model_is_listed(served):
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")


def test_a_key_is_asked_for(folder):
    with serving(folder, api_key="secret") as served:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            served.client.models.list()
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret")
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert httpx.get(f"{served.url}/health").status_code == 200


def post_and_leave(served, fields: dict) -> None:
    """Sends a request, reads the beginning of the answer if it is streamed, and goes."""
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        if fields.get("stream"):
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
            return
        while not served.worker.num_running:
            pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_request(served, stream):
    before = served.worker.engine.stats.num_new_tokens
    for _ in range(6):
        post_and_leave(served, {"prompt": "ab", "max_tokens": 500, "n": 2, "stream": stream, "ignore_eos": True})
    served.until_idle()
    assert served.worker.engine.stats.num_new_tokens - before < 6 * 2 * 500


def test_more_than_may_wait_are_told_to_come_back(folder, expected):
    with serving(folder, max_batch=1, max_waiting=1) as served:
        long = {"prompt": "ab", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=long) as first:
            assert first.status_code == 200
            with httpx.stream("POST", f"{served.url}/v1/completions", json=long) as second:
                assert second.status_code == 200
                with pytest.raises(openai.RateLimitError, match="at most 1 waiting"):
                    text_of(served.client, "ab")
        served.until_idle()
        assert text_of(served.client, "ab") == expected["ab"]
        with pytest.raises(openai.BadRequestError, match="at most 2 outputs of one request"):
            text_of(served.client, "ab", n=3)


def test_metrics_count_tokens_passes_and_answers(folder):
    with serving(folder) as served:
        text_of(served.client, "ab")
        httpx.get(f"{served.url}/nowhere")
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(found["dmtd_generated_tokens_total"]) == 21 and float(found["dmtd_prompt_tokens_total"]) == 2
        assert 0 < float(found["dmtd_parallel_passes_total"]) < float(found["dmtd_steps_total"])
        assert float(found['dmtd_answers_total{path="/v1/completions",status="200"}']) == 1
        assert float(found['dmtd_answers_total{path="other",status="404"}']) == 1
        assert float(found["dmtd_time_to_first_token_seconds_count"]) == float(found["dmtd_request_seconds_count"]) == 1


def break_steps(served) -> None:
    def broken():
        raise ZeroDivisionError("the step is broken")

    served.worker.engine.step = broken


def test_a_fault_of_the_engine_ends_every_request_and_the_service_says_so(folder):
    with serving(folder) as served:
        long = {"prompt": "ab", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            break_steps(served)
            last = [line for line in lines if line][-1]
            assert "ZeroDivisionError: the step is broken" in json.loads(last.removeprefix("data: "))["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="the step is broken"):
            text_of(served.client, "ab")
        assert httpx.get(f"{served.url}/health").status_code == 503
        assert served.worker.failed
