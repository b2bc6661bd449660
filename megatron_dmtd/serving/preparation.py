"""From the body of a request to prompts for the engine. The work grows with the body, so it runs in threads.

A prompt that cannot fit is refused by its length before it is tokenized. No part of a request is executed: the only template is
the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

from megatron_dmtd.chats.owners import Beginnings, render_with_owners
from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.chats.turns import Chat, ChatError, read_turns
from megatron_dmtd.errors import DataError, DMTDError, shown
from megatron_dmtd.inference import Engine, SamplingParams
from megatron_dmtd.inference.admission import check_length, check_length_cap, checked_ids
from megatron_dmtd.inference.cache_ops.admission import timeline_of
from megatron_dmtd.inference.loops import request_loops
from megatron_dmtd.inference.sampling_params import ParameterError
from megatron_dmtd.inference.text import encode
from megatron_dmtd.serving.bodies import parsed
from megatron_dmtd.serving.faults import TOO_LONG, RequestError, UnknownModelError
from megatron_dmtd.serving.message_cache import MessageOperations, Program
from megatron_dmtd.serving.requests import ChatRequest, CompletionRequest, GenerationRequest

#: what transformers itself passes to a chat template, besides the parameters of `apply_chat_template`
_OF_TEMPLATES = {"messages", "raise_exception", "strftime_now"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt."""

    ids: list[int]
    text: str | None = None
    """None where it came as ids."""
    program: Program | None = None
    """Its cache operations; None for an ordinary prompt."""


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
        self._beginnings = Beginnings()
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
            request_loops(self.engine.model.schedule.decoder, params.num_loops)
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
        vocab_size = self.engine.model.schedule.decoder.vocab_size
        place = body.name_of("prompt")
        try:
            for prompt in prompts:
                checked_ids(prompt.ids, vocab_size)
        except DataError as error:
            raise _named(error, param=place) from error
        room = min(self._room(prompt) for prompt in prompts)
        max_new_tokens = max(room, 1) if body.most_tokens is None else body.most_tokens
        check_length_cap(max_new_tokens, params)
        ordinary = [len(prompt.ids) for prompt in prompts if prompt.program is None]
        if ordinary:
            self._check_length(max(ordinary), max_new_tokens, cap=body.name_of("max_new_tokens"), place=place)
        for prompt in prompts:
            self._check_program(prompt, max_new_tokens, cap=body.name_of("max_new_tokens"), place=place)
        return Prepared(body=body, prompts=prompts, params=params, max_new_tokens=max_new_tokens)

    def _room(self, prompt: Prompt) -> int:
        """Tokens that may follow a prompt."""
        used = len(prompt.ids)
        if prompt.program is not None:
            try:
                used = timeline_of(prompt.program.operations, used, 0, self.engine.model.schedule).state(used).next_position
            except DataError as error:
                raise prompt.program.named(error) from error
        return self.engine.max_length - used

    def _check_length(self, longest: int, max_new_tokens: int, *, cap: str, place: str) -> None:
        max_length = self.engine.max_length
        try:
            check_length(longest, max_new_tokens, max_length, name=cap)
        except DataError as error:
            raise _named(error, param=place if longest >= max_length else cap, code=TOO_LONG) from error

    def _check_program(self, prompt: Prompt, max_new_tokens: int, *, cap: str, place: str) -> None:
        """Refuse in the words of the request what the engine would refuse in its own. Positions count, not tokens."""
        if prompt.program is None:
            return
        num_tokens = len(prompt.ids)
        try:
            timeline = timeline_of(prompt.program.operations, num_tokens, max_new_tokens, self.engine.model.schedule)
        except DataError as error:
            raise prompt.program.named(error) from error
        max_length = self.engine.max_length
        try:
            timeline.check_positions(num_tokens + max_new_tokens, max_length)
        except DataError as error:
            is_prompt = bool((timeline.birth[:num_tokens] >= max_length).any())
            raise _named(error, param=place if is_prompt else cap, code=TOO_LONG) from error

    # Prompts.

    def _texts(self, body: GenerationRequest) -> list[Prompt]:
        assert isinstance(body, CompletionRequest), type(body)
        found: list[Prompt] = []
        for index, (one, operations) in enumerate(zip(body.prompts, body.programs, strict=True)):
            name = f"cache[{index}]" if len(body.prompts) > 1 else "cache"
            program = None if operations is None else Program(operations, partial(_place, name))
            if isinstance(one, str):
                found.append(Prompt(self._encoded(one, is_bounded=program is None), one, program))
            else:
                found.append(Prompt(cast(list[int], one), program=program))
        return found

    def _encoded(self, text: str, *, is_bounded: bool) -> list[int]:
        if is_bounded:
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
        self._check_template(body)
        operations = body.operations
        if operations is not None:
            return [self._edited(body, operations)]
        try:
            text = ChatTemplates(self.tokenizer).render(_chat_of(body, self.tokenizer.chat_template), prompt=True)
        except ChatError as error:
            raise _unwritten(error) from error
        self._check_characters(text, param="messages")
        return [Prompt(encode(self.tokenizer, text, add_special_tokens=False))]

    def _edited(self, body: ChatRequest, operations: MessageOperations) -> Prompt:
        """A chat with cache operations. Its text may be longer than the model's longest; the limit on bodies is its bound."""
        operations.check(len(body.messages))
        chat = _chat_of(body, self.tokenizer.chat_template)
        template = ChatTemplates(self.tokenizer).of(chat)
        try:
            owned = render_with_owners(template, chat, bos=self.tokenizer.bos_token)
            self._beginnings.check(template, chat, owned, operations.triggers)
        except ChatError as error:
            raise _unwritten(error) from error
        ids = encode(self.tokenizer, owned.text, add_special_tokens=False)
        return Prompt(ids, program=operations.program(owned, self._token_starts(owned.text, ids)))

    def _token_starts(self, text: str, ids: list[int]) -> list[int]:
        """The character at which each token begins."""
        found = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        if list(found.ids) != ids:
            raise RequestError(
                found="a tokenizer that does not say which characters its tokens stand for",
                required="one that does, to find the tokens of a message",
                remedy="give token ids and operations on them to /v1/completions",
                param="cache",
            )
        return [begin for begin, _ in found.offsets]

    def _check_template(self, body: ChatRequest) -> None:
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


def _place(name: str, index: int) -> str:
    """Where an operation stands that came as such."""
    return f"{name}[{index}]"


def _unwritten(error: ChatError) -> RequestError:
    return RequestError(
        found=f"messages that cannot be written: {error}",
        required="roles in an order, and contents, that the model's chat template knows",
        remedy="change the messages",
        param="messages",
    )


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
