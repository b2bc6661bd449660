"""Message numbers as operations on tokens."""

import httpx
import pytest

from megatron_dmtd.chats.owners import OwnedText
from megatron_dmtd.errors import DataError
from megatron_dmtd.inference import Completion, Engine, EngineConfig, SamplingParams
from megatron_dmtd.serving.faults import RequestError
from megatron_dmtd.serving.message_cache import MessageOperations
from tests.serving.conftest import serving

#: four messages of 4, 2, 3 and 1 characters between a beginning and a prompt
OWNED = OwnedText("^AAAABBCCCD>", ((1, 5), (5, 7), (7, 10), (10, 11)))
#: one token per character, but "AB" across the first two messages
STARTS = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def operations(drop=None, reposition=(), name="cache.drop") -> MessageOperations:
    return MessageOperations(drop=drop or {}, reposition=list(reposition), drop_name=name, reposition_name="cache.reposition")


def program(**fields):
    found = operations(**fields)
    found.check(len(OWNED.spans))
    return found.program(OWNED, STARTS)


def test_a_message_is_dropped_once_its_trigger_has_been_computed():
    # Tokens of the messages: [1, 5) with the shared one, [5, 6), [6, 9), [9, 10).
    assert program(drop={2: [0]}).operations == [{"after": 9, "drop": [[1, 5]]}]
    assert program(drop={1: [1]}).operations == [{"after": 6, "drop": [[5, 6]]}]
    assert program(drop={3: [2, 0]}).operations == [{"after": 10, "drop": [[6, 9], [1, 5]]}]


def test_operations_rise_with_their_triggers_and_a_drop_comes_before_a_reposition():
    assert program(drop={3: [1], 2: [0]}, reposition=[1, 3]).operations == [
        {"after": 6, "reposition": True},
        {"after": 9, "drop": [[1, 5]]},
        {"after": 10, "drop": [[5, 6]], "reposition": True},
    ]


def test_what_was_dropped_before_is_left_out():
    assert program(drop={1: [0], 2: [0, 1, 1], 3: [0]}).operations == [
        {"after": 6, "drop": [[1, 5]]},
        {"after": 9, "drop": [[5, 6]]},
    ]
    assert program(drop={2: []}).operations == []


def test_tokens_without_characters_of_their_own_belong_where_the_last_one_began():
    starts = [0, 1, 2, 0, 3, 5, 6, 7, 8, 9, 10, 11]  # the fourth token says 0
    assert operations(drop={1: [0]}).program(OWNED, starts).operations == [{"after": 7, "drop": [[1, 5]]}]


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"drop": {4: [0]}}, r"cache.drop: message 4.*\n.*one of the 4 messages", "cache"),
        ({"drop": {2: [0, 9]}}, r"cache.drop.2\[1\]: message 9", "cache"),
        ({"drop": {1: [0, 2]}}, r"cache.drop.1\[1\]: message 2, dropped after message 1", "cache"),
        ({"drop": {1: [2]}, "name": "drop_message"}, r"drop_message.1\[0\]", "drop_message"),
        ({"reposition": [0, 4]}, r"cache.reposition\[1\]: message 4", "cache"),
        ({"reposition": [1, 1]}, r"cache.reposition\[1\]: message 1 after message 1", "cache"),
        ({"reposition": [2, 1]}, r"message 1 after message 2", "cache"),
    ],
)
def test_what_names_no_message_or_the_future_is_refused(fields, said, param):
    with pytest.raises(RequestError, match=said) as found:
        program(**fields)
    assert found.value.param == param


def test_a_message_that_the_template_does_not_show_is_refused_only_if_it_is_named():
    hidden = OwnedText(OWNED.text, (None, *OWNED.spans[1:]))
    assert operations(drop={2: [1]}).program(hidden, STARTS).operations
    for fields in ({"drop": {2: [0]}}, {"reposition": [0]}):
        with pytest.raises(RequestError, match="message 0, which cannot be told from the rest"):
            operations(**fields).program(hidden, STARTS)


def test_refusals_of_the_engine_are_said_in_the_words_of_the_request():
    found = program(drop={0: [0], 1: [1]}, reposition=[2])
    error = DataError(found="cache[2]: a reposition with nothing active", required="a", remedy="b")
    named = found.named(error)
    assert named.found == "cache.reposition, message 2: a reposition with nothing active" and named.param == "cache"


# Over HTTP.

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder, dtype="float64", max_length=512) as running:
        running.worker.engine.tokenizer.chat_template = TEMPLATE
        yield running


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def agent(num_turns: int) -> list[dict]:
    """A question, then calls and answers of a tool."""
    turns = [turn("user", "go")]
    for number in range(num_turns):
        turns += [turn("assistant", f"c{number}"), turn("tool", f"answer {number} ".ljust(20, "x"))]
    return turns


def written(messages: list[dict]) -> str:
    return "".join(f"<{one['role']}>{one['content']}</>" for one in messages)


def rolling(messages: list[dict], keep: int) -> dict:
    """Each answer of a tool is dropped when `keep` newer ones have arrived, and then the rest moves together."""
    answers = [number for number, one in enumerate(messages) if one["role"] == "tool"]
    drop = {str(new): [old] for old, new in zip(answers, answers[keep:])}
    return {"drop": drop, "reposition": [int(number) for number in drop]}


def ask(served, messages, cache, **fields):
    return served.client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=6,
        logprobs=True,
        extra_body={"cache": cache, "ignore_eos": True} if cache is not None else {"ignore_eos": True},
        **fields,
    )


def logprobs(answer) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


def by_hand(served, messages, cache) -> Completion:
    """The same as a program on tokens, found by writing the chat message by message: a token is a byte."""
    ends = [len(written(messages[: number + 1])) for number in range(len(messages))]
    begins = [0, *ends]
    program = [
        {
            "after": ends[number],
            "drop": [[begins[old], ends[old]] for old in cache["drop"].get(str(number), [])],
            **({"reposition": True} if number in cache["reposition"] else {}),
        }
        for number in sorted({*map(int, cache["drop"]), *cache["reposition"]})
    ]
    engine = served.worker.engine
    tokens = engine.tokenizer(written(messages) + "<assistant>")["input_ids"]
    assert len(tokens) == len(written(messages)) + len("<assistant>")
    fresh = Engine(engine.model.directory, EngineConfig(max_batch=4, cache_tokens=2048, max_length=512), dtype="float64")
    params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)
    return fresh.generate([tokens], max_new_tokens=6, params=params, cache=[program])[0]


def test_a_growing_chat_computes_only_what_is_new_and_gives_the_numbers_of_the_program_on_tokens(served):
    before = 0
    for num_turns in range(1, 7):
        messages = agent(num_turns)
        cache = rolling(messages, keep=2)
        answer = ask(served, messages, cache)
        expected = by_hand(served, messages, cache)
        assert logprobs(answer) == pytest.approx([choice.logprob for choice in expected.logprobs], abs=1e-9)
        usage = answer.usage.model_extra | {"prompt_tokens": answer.usage.prompt_tokens}
        reused = usage["cached_tokens"] + usage["repos_tokens"] + usage["drop_skipped_tokens"]
        assert reused + usage["prefill_tokens"] == usage["prompt_tokens"] == len(written(messages) + "<assistant>")
        assert answer.usage.prompt_tokens_details.cached_tokens == usage["cached_tokens"]
        # New are the last two messages; the prompt of before was "<assistant>", which is text of the new message.
        assert usage["prefill_tokens"] <= usage["prompt_tokens"] - before
        before = len(written(messages))
    assert usage["drop_skipped_tokens"] > 0 and usage["repos_tokens"] > 0


def test_dropping_changes_the_numbers_and_streams_say_the_same(served):
    messages = agent(4)
    cache = rolling(messages, keep=2)
    plain, edited = ask(served, messages, None), ask(served, messages, cache)
    assert max(abs(a - b) for a, b in zip(logprobs(plain), logprobs(edited), strict=True)) > 1e-3
    chunks = list(ask(served, messages, cache, stream=True, stream_options={"include_usage": True}))
    streamed = [token.logprob for chunk in chunks for one in chunk.choices if one.logprobs for token in one.logprobs.content]
    assert streamed == pytest.approx(logprobs(edited), abs=1e-9)
    warm = chunks[-1].usage  # computed is at most the rest of the last cycle
    assert 1 <= warm.prefill_tokens <= 4 and warm.prompt_tokens_details.drop_skipped_tokens > 0


def test_other_names_several_outputs_and_stop_strings(served):
    messages = agent(4)
    cache = rolling(messages, keep=2)
    edited = ask(served, messages, cache, n=2)
    assert edited.choices[0].message.content == edited.choices[1].message.content
    for other in (
        {"drop_message": cache["drop"], "reposition": cache["reposition"]},
        {"cache": {"drop_message": cache["drop"], "reposition": cache["reposition"]}},
    ):
        answer = served.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, logprobs=True, extra_body={**other, "ignore_eos": True}
        )
        assert logprobs(answer) == pytest.approx(logprobs(edited), abs=1e-9)
    text = edited.choices[0].message.content
    stopped = ask(served, messages, cache, stop=[text[3]])
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].message.content == text[: text.index(text[3])]


def test_completions_take_operations_on_tokens(served):
    def complete(prompt, cache):
        return served.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, logprobs=0, extra_body={"cache": cache, "ignore_eos": True}
        )

    program = [{"after": 8, "drop": [[2, 6]]}, {"after": 10, "reposition": True}]
    one = complete("abcdefghijklm", program)
    ids = served.worker.engine.tokenizer("abcdefghijklm")["input_ids"]
    assert complete(ids, program).choices[0].logprobs.token_logprobs == pytest.approx(one.choices[0].logprobs.token_logprobs)
    both = complete(["abcdefghijklm", "abcdefghijklm"], [program, None])
    assert both.choices[0].logprobs.token_logprobs == pytest.approx(one.choices[0].logprobs.token_logprobs, abs=1e-9)
    alone = complete(["abcdefghijklm"], [program])  # a list of one prompt, and its operations in either form
    assert alone.choices[0].logprobs.token_logprobs == pytest.approx(one.choices[0].logprobs.token_logprobs, abs=1e-9)
    assert complete(["abcdefghijklm"], program).choices[0].logprobs.token_logprobs == alone.choices[0].logprobs.token_logprobs
    plain = complete("abcdefghijklm", None)
    assert complete(["abcdefghijklm"], [None]).usage.model_extra["drop_skipped_tokens"] == 0
    assert both.choices[1].logprobs.token_logprobs == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-9)


CHAT = {"model": "tiny", "messages": agent(2), "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"cache": {"drop": {"5": [0]}}}, "cache.drop: message 5", "cache"),
        ({"cache": {"drop": {"2": [3]}}}, "message 3, dropped after message 2", "cache"),
        ({"cache": {"drop": {"2": ["1"]}}}, "at index 0 in 2", "cache.drop"),
        ({"cache": {"drop": {"2": [-1]}}}, "not -1", "cache.drop"),
        ({"cache": {"drop": {"2": [True]}}}, "not True", "cache.drop"),
        ({"cache": {"drop": {"two": [0]}}}, "message numbers, counted from 0, as names", "cache.drop"),
        ({"cache": {"drop": [[0, 1]]}}, "an object", "cache.drop"),
        ({"cache": {"reposition": [2, 2]}}, "message numbers that rise", "cache"),
        ({"cache": {"reposition": 2}}, "a list", "cache.reposition"),
        ({"cache": {"after": 3}}, "unknown field after", "cache"),
        ({"cache": []}, "cache", "cache"),
        ({"cache": {"drop": {}}, "drop_message": {}}, "cache together with drop_message", "cache"),
        ({"cache": {"drop": {"2": [10**3000]}}}, "message 1000", "cache"),
        ({"cache": {}, "max_tokens": 600}, "positions below 512", "max_tokens"),
        ({"cache": {}, "messages": [turn("user", "x" * 600)]}, "positions below 512", "messages"),
    ],
)
def test_bad_operations_on_messages_are_refused_by_name(served, body, said, param):
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT | body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(error["message"]) < 1000
    if param.startswith("cache") and "together" not in said:
        assert error["code"] == "invalid_cache_operations"
    else:  # what agents look for: the chat is too long
        assert error["code"] == (None if "together" in said else "context_length_exceeded")
    served.until_idle()


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ([{"after": 99, "drop": [[0, 1]]}], "cache[0].after=99"),
        ([{"after": 3, "drop": [[0, 1]]}, {"after": 2, "reposition": True}], "cache[1].after=2"),
        ([{"after": 3, "drop": [[2, 1]]}], "cache[0].drop[0]=[2, 1]"),
        ([{"after": 3, "drop": [[0, 4]]}], "none of the future"),
        ([{"after": "3", "drop": [[0, 1]]}], "cache[0].after: '3'"),
        ([{"drop": [[0, 1]]}], "no after"),
        ([{"after": 8, "drop": [[0, 8]], "reposition": True}], "nothing active"),
        ([{"after": 1, "drop": [[0, 1]]}] * 5000, "5000 operations"),
        ({"drop": {}}, "a list of operations"),
        ([{"after": 10**3000}], "cache[0].after=1000"),
        ([None], "cache[0]: None"),
    ],
)
def test_bad_operations_on_tokens_are_refused_by_name(served, cache, said):
    body = {"model": "tiny", "prompt": "abcdefgh", "max_tokens": 2, "cache": cache}
    answer = httpx.post(f"{served.url}/v1/completions", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    error = answer.json()["error"]
    assert error["param"] == "cache" and error["code"] == "invalid_cache_operations" and len(error["message"]) < 1000
    several = httpx.post(f"{served.url}/v1/completions", json=body | {"prompt": ["abcdefgh", "abcdefgh"], "cache": [None, cache]})
    assert several.status_code == 400


def test_what_can_never_be_cached_at_one_time_is_refused_as_the_others(served):
    program = [{"after": index + 400, "drop": [[index, index + 1]], "reposition": True} for index in range(512)]
    body = {"model": "tiny", "prompt": [97] * 912, "max_tokens": 1, "cache": program}
    answer = httpx.post(f"{served.url}/v1/completions", json=body)
    assert answer.status_code == 400 and "must be cached at one time" in answer.json()["error"]["message"]
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("cache", "invalid_cache_operations")
    served.until_idle()


def test_a_text_longer_than_the_models_longest_is_served_if_its_positions_are_not(served):
    messages = agent(20)
    assert len(written(messages)) > 600
    assert httpx.post(f"{served.url}/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 400
    answer = ask(served, messages, rolling(messages, keep=2))
    assert answer.usage.prompt_tokens > 600 and answer.usage.completion_tokens == 6


def test_a_chat_that_the_template_rewrites_is_refused_by_name(served):
    tokenizer = served.worker.engine.tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    try:
        body = CHAT | {"cache": {"drop": {"2": [0]}}}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    finally:
        tokenizer.chat_template = TEMPLATE
    assert answer.status_code == 400 and "in another way now that others follow" in answer.json()["error"]["message"]
