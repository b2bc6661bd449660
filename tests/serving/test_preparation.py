"""From bodies to prompts: what reaches the tokenizer and the template, and what is refused before it does."""

import json

import pytest

from megatron_dmtd.inference import Engine, EngineConfig
from megatron_dmtd.serving.faults import TOO_LONG, RequestError, UnknownModelError
from megatron_dmtd.serving.preparation import Preparation, Prepared
from megatron_dmtd.serving.requests import ChatRequest, CompletionRequest
from tests.inference.looped_models import engine_of
from tests.oracles.looped import Looped, random_weights
from tests.serving.conftest import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine(folder, EngineConfig(max_batch=2, max_length=64, cache_tokens=128), device="cpu")


@pytest.fixture
def preparation(engine, monkeypatch) -> Preparation:
    monkeypatch.setattr(engine.tokenizer, "chat_template", CHAT_TEMPLATE)
    return Preparation(engine, model_name="tiny", defaults={"temperature": 0.5, "top_k": 7}, max_samples=6)


def text(preparation: Preparation, **fields) -> Prepared:
    return preparation.prepare(json.dumps({"prompt": "ab", **fields}).encode(), CompletionRequest)


def chat(preparation: Preparation, *messages, **fields) -> Prepared:
    return preparation.prepare(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)


def user(content: str = "a", **fields) -> dict:
    return {"role": "user", "content": content, **fields}


def written(preparation: Preparation, prepared: Prepared) -> str:
    return preparation.tokenizer.decode(prepared.prompts[0].ids)


def test_texts_and_ids_become_prompts_and_defaults_hold_where_a_request_is_silent(preparation):
    prepared = text(preparation, prompt=["ab", "é"], max_tokens=5, top_k=3)
    assert [prompt.text for prompt in prepared.prompts] == ["ab", "é"]
    assert [prompt.ids for prompt in prepared.prompts] == [preparation.tokenizer(one)["input_ids"] for one in ("ab", "é")]
    assert (prepared.max_new_tokens, prepared.params.temperature, prepared.params.top_k) == (5, 0.5, 3)
    assert text(preparation, prompt=[1, 2]).prompts[0].ids == [1, 2]


def test_a_chat_is_written_by_the_models_own_template(preparation):
    prepared = chat(preparation, user("hi"), {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}, user("é"))
    assert written(preparation, prepared) == "<user>hi<assistant>yo<user>é<assistant>"
    assert prepared.max_new_tokens == 64 - len(prepared.prompts[0].ids)


def test_no_null_is_written_as_a_word(preparation):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prepared = chat(
        preparation, user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}
    )
    assert written(preparation, prepared) == "<user>hi<assistant><tool>4<assistant>"


def test_a_developer_is_a_system_where_the_template_knows_no_developers(preparation, engine, monkeypatch):
    messages = [{"role": "developer", "content": "x"}, user("y")]
    assert written(preparation, chat(preparation, *messages)) == "<system>x<user>y<assistant>"
    monkeypatch.setattr(engine.tokenizer, "chat_template", CHAT_TEMPLATE + "{# developer #}")
    assert written(preparation, chat(preparation, *messages)) == "<developer>x<user>y<assistant>"


def test_values_for_the_template_reach_it(preparation, engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].content }}{{ mood }}{{ messages[0].name }}")
    assert written(preparation, chat(preparation, user("a", name="me"), chat_template_kwargs={"mood": "!"})) == "a!me"


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tools", "documents", "tokenize", "add_generation_prompt", "conversation", "messages", "eos_token",
     "return_tensors", "tokenizer_kwargs", "raise_exception", "continue_final_message", "return_assistant_tokens_mask"],
)  # fmt: skip
def test_a_request_brings_no_template_and_changes_nothing_around_it(preparation, name):
    with pytest.raises(RequestError, match=f"chat_template_kwargs with {name}") as refused:
        chat(preparation, user(), chat_template_kwargs={name: "{{ 1 }}"})
    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_what_the_template_raises_is_a_refusal(preparation, engine, monkeypatch):
    for template in ("{{ raise_exception('no such order') }}", "{{ messages.absent.field }}", "{% for x in 3 %}{% endfor %}"):
        monkeypatch.setattr(engine.tokenizer, "chat_template", template)
        with pytest.raises(RequestError, match="chat template refuses") as refused:
            chat(preparation, user())
        assert refused.value.param == "messages"
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        chat(preparation, user())


@pytest.mark.parametrize(
    ("fields", "param", "found"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"max_tokens": 63}, "max_tokens", "a prompt of 2 tokens and max_tokens=63"),
        ({"prompt": "a" * 64, "max_tokens": 1}, "prompt", "a prompt of 64 tokens and max_tokens=1"),
        ({"prompt": ""}, "prompt", "an empty prompt"),
        ({"prompt": [1, 258]}, "prompt", r"token ids \[258\]"),
        ({"top_p": 7}, "top_p", "top_p=7"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "logit_bias={258: 1.0}"),
        ({"logit_bias": {str(index): -1e400 for index in range(258)}}, "logit_bias", "logit_bias="),
        ({"logit_bias": {"5": 1e39}}, "logit_bias", "logit_bias="),
        ({"presence_penalty": 1e300}, "presence_penalty", "presence_penalty=1e"),
        ({"temperature": 1e400}, "temperature", "temperature=inf"),
        ({"n": 7}, "n", "n=7"),
        ({"n": 0}, "n", "n=0"),
        ({"n": 10**300}, "n", "n=1000"),
        ({"prompt": ["a"] * 7}, "prompt", "7 prompts with n=1"),
        ({"prompt": ["a"] * 3, "n": 3}, "n", "3 prompts with n=3"),
        ({"stop_token_ids": [300]}, "stop_token_ids", r"stop_token_ids=\(300,\)"),
    ],
    ids=repr,
)
def test_what_the_engine_would_refuse_is_refused_here_in_the_clients_words(preparation, fields, param, found):
    # json writes an infinite number as a word that JSON does not have
    raw = json.dumps({"prompt": "ab", "max_tokens": 1, **fields}).replace("-Infinity", "-1e400").replace("Infinity", "1e400")
    with pytest.raises(RequestError, match=found) as refused:
        preparation.prepare(raw.encode(), CompletionRequest)
    assert refused.value.param == param and "max_new_tokens" not in str(refused.value)


def test_a_chats_parameters_have_its_own_names(preparation):
    for fields, param in (({"max_tokens": 60}, "max_tokens"), ({"max_completion_tokens": 60}, "max_completion_tokens")):
        with pytest.raises(RequestError, match=f"and {param}=60") as refused:
            chat(preparation, user(), **fields)
        assert refused.value.param == param and refused.value.code == TOO_LONG
    with pytest.raises(RequestError, match="a prompt of 74 tokens") as refused:
        chat(preparation, user("a" * 57))
    assert refused.value.param == "messages" and refused.value.code == TOO_LONG


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(preparation, engine, monkeypatch):
    """The longest token of this vocabulary is `<mask>`: 64 tokens are 384 characters at most."""

    def tokenized(*_, **__):
        raise AssertionError("it has been tokenized")

    assert preparation.max_characters == 64 * len("<mask>")
    monkeypatch.setattr(type(engine.tokenizer), "__call__", tokenized)
    with pytest.raises(AssertionError):
        text(preparation, prompt="a" * 384)
    for prepare in (lambda: text(preparation, prompt="a" * 385), lambda: chat(preparation, user("a" * 385))):
        with pytest.raises(RequestError, match="at most 64 tokens, which are 384 characters at most") as refused:
            prepare()
        assert refused.value.code == TOO_LONG and refused.value.param in ("prompt", "messages")


def test_another_model_is_not_served(preparation):
    assert text(preparation, model="tiny").prompts
    with pytest.raises(UnknownModelError, match="found: model 'gpt'") as refused:
        text(preparation, model="gpt")
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")


def test_loops_are_checked_by_the_name_that_a_client_gives_them(preparation):
    assert text(preparation, n_recurrent_loops=None).params.num_loops is None
    assert chat(preparation, user("a"), n_recurrent_loops=1).params.num_loops == 1
    for fields in ({"n_recurrent_loops": 2}, {"n_recurrent_loops": 0}, {"n_recurrent_loops": 1.5}):
        for ask in (lambda fields: text(preparation, **fields), lambda fields: chat(preparation, user("a"), **fields)):
            with pytest.raises(RequestError) as refusal:
                ask(fields)
            assert refusal.value.param == "n_recurrent_loops"
    looped = engine_of(Looped(windows=(None,) * 4), random_weights(Looped(), seed=1), num_loops=3)
    looped.tokenizer = preparation.tokenizer
    served = Preparation(looped, model_name="looped", defaults={}, max_samples=6)
    assert text(served, prompt=[1, 2], n_recurrent_loops=3).params.num_loops == 3
    with pytest.raises(RequestError, match="at most 3, the loops that the cache has places for") as refusal:
        text(served, prompt=[1, 2], n_recurrent_loops=4)
    assert refusal.value.param == "n_recurrent_loops"
