"""A tokenizer's chat template: chats as text, by the same engine as `apply_chat_template` and with the same result.

Three things are added. No value is ever written as Python shows it: lists and objects that a template writes without `tojson`
are refused. Contents in parts, and arguments of calls, are given in the form that the template takes, where the form of the
record is not one: a list of parts as one text, arguments in JSON as an object, and vice versa. What a template takes is found out
by rendering, not by reading it. Content that is null is left out, as `transformers` does, or is the empty text where a template
needs one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_dmtd.chats.trace import MARKS, MAX_TRACED_MESSAGES, marking, spans_of, traced
from megatron_dmtd.chats.turns import REASONING_FIELDS, Chat, ChatError, Turn
from megatron_dmtd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: texts that no template writes by itself
_PROBE, _OTHER_PROBE = "probeofacontent", "probeofanother"
_PROBE_USER: Turn = {"role": "user", "content": "probe"}


class _ReprError(Exception):
    """A template writes a value as Python shows it."""


def _refuse_to_be_written(value: Any) -> NoReturn:
    kind = "null" if value is None else "a list" if isinstance(value, list | tuple) else "an object"
    raise _ReprError(f"it writes {kind} of the chat without tojson, as Python shows it")


class _Object(dict[str, Any]):
    """An object that can be read and made JSON, but not written."""

    def __repr__(self) -> str:
        _refuse_to_be_written(self)


class _Array(list[Any]):
    """A list of the same kind."""

    def __repr__(self) -> str:
        _refuse_to_be_written(self)


def _guarded(value: Any) -> Any:
    if isinstance(value, dict):
        return _Object({key: _guarded(item) for key, item in value.items()})
    return _Array([_guarded(item) for item in value]) if isinstance(value, list) else value


def _written(value: Any) -> Any:
    """Jinja calls this for each value that it is about to write."""
    if value is None or isinstance(value, dict | list | tuple | set):
        _refuse_to_be_written(value)
    return value


@lru_cache(maxsize=16)
def _compiled(source: str, *, is_traced: bool = False) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment.overlay(finalize=_written)
    return traced(environment, source) if is_traced else environment.from_string(source)


class ChatTemplate:
    """One template of a tokenizer."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        """`special_tokens`: what the template may write by name, such as `eos_token`."""
        self.source = source
        self.marks_turns = _MARKS_TURNS.search(source) is not None
        """Whether it says itself what the assistant wrote."""
        self._special_tokens = special_tokens
        self._takes: dict[str, _Contents] = {}

    def render(self, chat: Chat, *, prompt: bool = False) -> str:
        """The chat as text; with `prompt`, up to where the assistant begins to write. Raises `ChatError`."""
        return self.render_marked(chat, prompt=prompt)[0]

    def render_marked(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """The chat as text, and the spans of characters that the template marks as the assistant's. Raises `ChatError`."""
        return self._written(chat, prompt=prompt, is_traced=False)

    def render_traced(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span | None]]:
        """The chat as text, and the span of characters that a loop over the messages writes for each: header, contents and end.

        None for a message that no loop writes, or that several do. Raises `ChatError`, also if the text cannot be traced.
        """
        text = self.render(chat, prompt=prompt)
        if MARKS.search(text) or len(chat.messages) > MAX_TRACED_MESSAGES:
            raise ChatError("it holds characters for private use, with which messages are told apart; leave them out")
        marked, _ = self._written(chat, prompt=prompt, is_traced=True)
        plain, spans = spans_of(marked, len(chat.messages))
        if plain != text:
            raise ChatError("the chat template changes what it has written for a message, so messages cannot be told apart")
        return text, spans

    def _written(self, chat: Chat, *, prompt: bool, is_traced: bool) -> tuple[str, list[Span]]:
        messages = self.formed(chat.messages)
        try:
            return self._render(chat, messages, prompt=prompt, is_traced=is_traced)
        except Exception as error:  # a template may raise anything on a chat that it does not support
            if all("content" in message for message in messages):
                raise _refusal(error) from error
        try:
            return self._render(chat, [{"content": "", **message} for message in messages], prompt=prompt, is_traced=is_traced)
        except Exception as error:
            raise _refusal(error) from error

    def unread(self, chat: Chat) -> list[str]:
        """Which parts of a chat the template cannot write, because it does not even name them."""
        fields = ["tools"] if chat.tools else []
        fields += ["tool_calls"] if any(message.get("tool_calls") for message in chat.messages) else []
        fields += sorted(chat.values)
        return [field for field in fields if field not in self.source]

    def _render(self, chat: Chat, messages: Sequence[Turn], *, prompt: bool, is_traced: bool = False) -> tuple[str, list[Span]]:
        compiled = _compiled(self.source, is_traced=is_traced)
        guarded = _guarded([_with_thoughts(message) for message in messages])
        values = {**self._special_tokens, **_guarded(chat.values), **(marking(guarded) if is_traced else {})}
        blocks: list[str] = []
        spans: list[Span] = []
        with compiled.environment.activate_tracker(blocks, spans):
            for block in compiled.generate(
                messages=guarded,
                tools=_guarded(chat.tools),
                documents=_guarded(chat.documents),
                add_generation_prompt=prompt,
                **values,
            ):
                blocks.append(block)
        return "".join(blocks), spans

    # Forms.

    def formed(self, messages: Iterable[Turn]) -> list[Turn]:
        """Turns in the forms that the template takes."""
        return [self._formed(message) for message in messages]

    def _formed(self, message: Turn) -> Turn:
        content: Any = message.get("content")
        calls = message.get("tool_calls")
        if isinstance(content, str):
            # the most frequent case by far: what takes no text at all is rare, so it is only asked once for each role
            takes = self._contents(message["role"])
            if content and takes.parts and not takes.text:
                message = {**message, "content": [{"type": "text", "text": content}]}
        elif _are_parts(content) and not self._contents(message["role"]).parts:
            message = {**message, "content": "".join(part["text"] for part in content)}
        if calls:
            message = {**message, "tool_calls": [self._formed_call(call) for call in calls]}
        return message

    def _formed_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = self._formed_arguments(function.get("arguments"))
        if arguments is function.get("arguments"):
            return call
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function

    def _formed_arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, str) and self._arguments.objects and not self._arguments.json:
            try:
                values = json.loads(arguments)
            except (ValueError, RecursionError):
                return arguments  # models write such, and a chat goes on
            return values if isinstance(values, dict) else arguments
        if isinstance(arguments, dict) and self._arguments.json and not self._arguments.objects:
            return json.dumps(arguments, ensure_ascii=False)
        return arguments

    def _contents(self, role: str) -> _Contents:
        if role not in self._takes:
            text = self._probe(*_conversation({"role": role, "content": _PROBE}))
            parts = [{"type": "text", "text": _PROBE}, {"type": "text", "text": _OTHER_PROBE}]
            several = self._probe(*_conversation({"role": role, "content": parts}))
            self._takes[role] = _Contents(text=_PROBE in text, parts=_PROBE in several and _OTHER_PROBE in several)
        return self._takes[role]

    @cached_property
    def _arguments(self) -> _Arguments:
        arguments = {"k": _PROBE}
        as_json = json.dumps(arguments)
        return _Arguments(
            objects=_PROBE in self._probe(_PROBE_USER, _calling(arguments)),
            json=as_json in self._probe(_PROBE_USER, _calling(as_json)),
        )

    def _probe(self, *messages: Turn) -> str:
        """What the template writes; nothing if it refuses."""
        try:
            return self._render(Chat(messages=list(messages)), messages, prompt=False)[0]
        except Exception:  # as for any chat
            return ""


@dataclass(frozen=True, slots=True)
class _Contents:
    """Forms in which a template takes the contents of a role."""

    text: bool
    parts: bool


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Forms in which a template takes the arguments of a call."""

    objects: bool
    json: bool


def _refusal(error: Exception) -> ChatError:
    return ChatError(f"the chat template refuses it: {type(error).__name__.lstrip('_')}: {str(error)[:500]}")


def _are_parts(content: Any) -> bool:
    """Only the answers of tools may be lists of anything else."""
    return isinstance(content, list) and all(item.get("type") == "text" and isinstance(item.get("text"), str) for item in content)


def _with_thoughts(message: Turn) -> Turn:
    """As `transformers` passes them: under the name of most templates, and under that of gpt-oss."""
    thoughts = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _calling(arguments: Any) -> Turn:
    # some templates insist on an id of nine letters
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _conversation(message: Turn) -> Iterator[Turn]:
    """A chat in which templates expect a turn of this role."""
    if message["role"] in ("system", "developer"):
        return iter((message, _PROBE_USER))
    if message["role"] == "assistant":
        return iter((_PROBE_USER, message))
    if message["role"] == "tool":
        return iter((_PROBE_USER, _calling({}), {**message, "tool_call_id": "abcdefghi", "name": "probe"}))
    return iter((message,))


@lru_cache(maxsize=16)
def _template(source: str, special_tokens: tuple[tuple[str, Any], ...]) -> ChatTemplate:
    """One for each source, so that what it takes is found out once."""
    return ChatTemplate(source, dict(special_tokens))


class ChatTemplates:
    """All templates of one tokenizer: some have one of their own for chats with tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `DataError` if the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise DataError(
                found=f"the tokenizer in {tokenizer.name_or_path} has no chat template",
                required="a chat template, to write chats as text",
                remedy="add chat_template.jinja to its folder, or read a text with --text-key",
            )
        self._tokenizer = tokenizer
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self.special = _any_of(special | {str(tokenizer.eos_token)} if tokenizer.eos_token else special)
        """Finds special tokens in a text."""
        self.added = _any_of(added)
        """Finds tokens that are not made of the vocabulary's."""

    def of(self, chat: Chat) -> ChatTemplate:
        """The one that `apply_chat_template` takes for a chat."""
        source = self._tokenizer.get_chat_template(None, chat.tools)
        return _template(source, tuple(self._tokenizer.special_tokens_map.items()))

    def render(self, chat: Chat, *, prompt: bool = False) -> str:
        """See `ChatTemplate.render`."""
        return self.of(chat).render(chat, prompt=prompt)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
