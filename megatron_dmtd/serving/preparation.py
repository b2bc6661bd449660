"""From the body of a request to prompts for the engine. The work grows with the body, so it runs in threads.

A prompt that cannot fit is refused by its length before it is tokenized. No part of a request is executed: the only template is
the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.chats.turns import Chat, ChatError, read_turns
from megatron_dmtd.errors import DataError, DMTDError, shown
from megatron_dmtd.inference import Engine, SamplingParams
from megatron_dmtd.inference.admission import check_length, check_length_cap, checked_ids
from megatron_dmtd.inference.sampling_params import ParameterError
from megatron_dmtd.inference.text import encode
from megatron_dmtd.serving.bodies import parsed
from megatron_dmtd.serving.faults import TOO_LONG, RequestError, UnknownModelError
from megatron_dmtd.serving.requests import ChatRequest, CompletionRequest, GenerationRequest

#: what transformers itself passes to a chat template, besides the parameters of `apply_chat_template`
_OF_TEMPLATES = {"messages", "raise_exception", "strftime_now"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt."""

    ids: list[int]
    text: str | None = None
    """None where it came as ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A request that the engine can serve."""

    body: GenerationRequest
    prompts: list[Prompt]
    params: SamplingParams
    max_new_tokens: int


class Preparation:
    """Reads requests for one engine."""

    def __init__(self, engine: Engine, *, model_name: str, defaults: Mapping[str, float], max_samples: int) -> None:
        """`max_samples`: the outputs of one request at most, as many as the server can ever hold."""
        self.engine, self.model_name, self.defaults, self.max_samples = engine, model_name, defaults, max_samples
        self.tokenizer = engine.tokenizer
        # These are switched off here once and never set again by a call, so several threads may use the tokenizer at once.
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()

    @cached_property
    def max_characters(self) -> int:
        """Characters beyond which a text cannot have few enough tokens, however long each is."""
        return self.engine.max_length * max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """Names that `chat_template_kwargs` may not give: they would replace the template, or what it is given otherwise."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return frozenset({*own, *self.tokenizer.special_tokens_map, *_OF_TEMPLATES})

    def prepare(self, raw: bytes, kind: type[GenerationRequest]) -> Prepared:
        """The request in a body. Raises `RequestError`."""
        body = kind.taken_from(parsed(raw))
        self.check_model(body.model)
        try:
            params = body.sampling_params(self.defaults)
            params.check(self.engine.model.schedule.decoder.vocab_size)
            self._check_number(body)
            prompts = self._chat(body) if isinstance(body, ChatRequest) else self._texts(body)
            return self._checked(body, prompts, params)
        except ParameterError as error:
            name = body.name_of(error.name)
            raise _named(error.renamed(name), param=name) from error

    def check_model(self, name: str | None) -> None:
        """Accept the name of the model, or none. Raises `UnknownModelError`."""
        if name not in (None, self.model_name):
            raise UnknownModelError(
                found=f"model {shown(name)}",
                required=self.model_name,
                remedy="name that model, or none; see /v1/models",
                param="model",
                code="model_not_found",
            )

    def _check_number(self, body: GenerationRequest) -> None:
        """Refuse what could never be admitted, however long it waited."""
        num_prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        if body.n * num_prompts > self.max_samples:
            raise RequestError(
                found=f"{num_prompts} prompts with n={body.n}" if num_prompts > 1 else f"n={body.n}",
                required=f"at most {self.max_samples} outputs of one request: no more can wait or run here",
                remedy="send fewer at once, or start the server with a larger --max-waiting",
                param="n" if body.n > 1 else "prompt",
            )

    def _checked(self, body: GenerationRequest, prompts: list[Prompt], params: SamplingParams) -> Prepared:
        """What the engine will not refuse."""
        max_length, vocab_size = self.engine.max_length, self.engine.model.schedule.decoder.vocab_size
        longest = max(len(prompt.ids) for prompt in prompts)
        max_new_tokens = max(max_length - longest, 1) if body.most_tokens is None else body.most_tokens
        cap, place = body.name_of("max_new_tokens"), body.name_of("prompt")
        check_length_cap(max_new_tokens, params)
        try:
            for prompt in prompts:
                checked_ids(prompt.ids, vocab_size)
        except DataError as error:
            raise _named(error, param=place) from error
        try:
            check_length(longest, max_new_tokens, max_length, name=cap)
        except DataError as error:
            raise _named(error, param=place if longest >= max_length else cap, code=TOO_LONG) from error
        return Prepared(body=body, prompts=prompts, params=params, max_new_tokens=max_new_tokens)

    # Prompts.

    def _texts(self, body: GenerationRequest) -> list[Prompt]:
        assert isinstance(body, CompletionRequest), type(body)
        return [Prompt(self._encoded(one), one) if isinstance(one, str) else Prompt(one) for one in body.prompts]

    def _encoded(self, text: str) -> list[int]:
        self._check_characters(text, param="prompt")
        return encode(self.tokenizer, text)

    def _check_characters(self, text: str, *, param: str) -> None:
        if len(text) > self.max_characters:
            raise RequestError(
                found=f"a prompt of {len(text)} characters",
                required=f"at most {self.engine.max_length} tokens, which are {self.max_characters} characters at most",
                remedy="shorten it",
                param=param,
                code=TOO_LONG,
            )

    def _chat(self, body: ChatRequest) -> list[Prompt]:
        text = self._written(body)
        self._check_characters(text, param="messages")
        return [Prompt(encode(self.tokenizer, text, add_special_tokens=False))]

    def _written(self, body: ChatRequest) -> str:
        """A chat as a text."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                found="a model whose tokenizer has no chat template",
                required="one, to write a chat as a text",
                remedy="use /v1/completions, or put a chat template into the model's directory",
                param="messages",
            )
        if reserved := sorted(body.chat_template_kwargs.keys() & self._reserved):
            raise RequestError(
                found=f"chat_template_kwargs with {', '.join(reserved)}",
                required="values for the model's own chat template",
                remedy="drop what is not one",
                param=f"chat_template_kwargs.{reserved[0]}",
            )
        templates = ChatTemplates(self.tokenizer)
        try:
            return templates.render(_chat_of(body, self.tokenizer.chat_template), prompt=True)
        except ChatError as error:
            raise RequestError(
                found=f"messages that cannot be written: {error}",
                required="roles in an order, and contents, that the model's chat template knows",
                remedy="change the messages",
                param="messages",
            ) from error


def _chat_of(body: ChatRequest, template: str | Mapping[str, str]) -> Chat:
    """What the template is given. OpenAI's newer name for the system role is only passed on to templates that know it."""
    turns = read_turns([message.as_turn() for message in body.messages])
    if "developer" not in str(template):
        for turn in turns:
            turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
    return Chat(messages=turns, values=body.chat_template_kwargs)


def _named(error: DMTDError, *, param: str, code: str | None = None) -> RequestError:
    """The same refusal with the field at fault."""
    return RequestError(found=error.found, required=error.required, remedy=error.remedy, param=param, code=code)
