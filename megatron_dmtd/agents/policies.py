"""What an agent sends for its next turn: pure functions of its whole history.

    request = RollingDrop()(messages, count)
    body = {"model": ..., "messages": request.messages, **request.fields}

A policy keeps no state: it derives everything from the history, as a fold from the first message to the last. So a retry or a
cold start gives the same request, and the operations of a later request begin with those of an earlier one (`RollingDrop`),
without which nothing would be found in the cache.

Sizes decide only when something happens, so `count` may be an estimate. It must be a function of the message alone.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dmtd.errors import ConfigError

Message = dict[str, Any]
#: tokens of a message, its header and end included
Count = Callable[[Message], int]

#: tool responses that stay visible
KEEP_TOOL_RESPONSES = 12
#: tokens in positions beyond which the survivors move to positions from 0
REPOSITION_TOKENS = 96_000
#: tokens of a text beyond which its beginning is summarised
SUMMARY_TOKENS = 48_000
#: tokens with which a prompt asks the assistant to begin
HEADER_TOKENS = 4
#: lines of a summary, and characters of each part of a line
_SUMMARY_LINES, _LINE = 40, 80
_OPENING_ROLES = ("system", "developer", "user")


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """What is sent for a turn."""

    messages: list[Message]
    cache: dict[str, Any] | None = None
    """The field `cache` of the HTTP API (docs/cache_operations.md); None: an ordinary request."""

    @property
    def fields(self) -> dict[str, Any]:
        """More fields for the body of the request, or for `extra_body` of OpenAI's client."""
        return {} if self.cache is None else {"cache": self.cache}


class Policy(Protocol):
    """From a history, which ends where the assistant is to begin, to a request."""

    @property
    def name(self) -> str:
        """In reports."""

    def __call__(self, messages: Sequence[Message], count: Count) -> AgentRequest:
        """The request for the next turn."""


def ends_request(messages: Sequence[Message], number: int) -> bool:
    """Whether a request ended with this message: the assistant's turn follows, or is to follow."""
    if messages[number]["role"] == "assistant":
        return False
    return number + 1 == len(messages) or messages[number + 1]["role"] == "assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class RollingDrop:
    """The text stays as it is; tool responses older than the last few are dropped from the cache.

    When one tool response more than `keep` arrives, the oldest is dropped at the boundary of the new one, which itself still
    reads it. Once the next position passes a threshold, and if something has been dropped since the last time, the survivors
    move to positions from 0 at the end of that request.
    """

    keep: int = KEEP_TOOL_RESPONSES
    """Tool responses that stay visible; at least 1."""
    reposition_tokens: int = REPOSITION_TOKENS
    """The threshold, in tokens; the header with which the assistant begins counts."""
    header_tokens: int = HEADER_TOKENS
    name: str = "rolling_drop"

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        _check("keep", self.keep)
        _check("reposition_tokens", self.reposition_tokens)

    def __call__(self, messages: Sequence[Message], count: Count) -> AgentRequest:
        """See `Policy`."""
        drop: dict[str, list[int]] = {}
        reposition: list[int] = []
        responses: deque[int] = deque()
        position = active = 0
        has_dropped = False
        for number, message in enumerate(messages):
            size = count(message)
            position, active = position + size, active + size
            if message["role"] == "tool":
                responses.append(number)
                if len(responses) > self.keep:
                    oldest = responses.popleft()
                    drop[str(number)] = [oldest]
                    active -= count(messages[oldest])
                    has_dropped = True
            if has_dropped and position + self.header_tokens > self.reposition_tokens and ends_request(messages, number):
                reposition.append(number)
                position, has_dropped = active, False
        return AgentRequest(list(messages), {"drop": drop, "reposition": reposition})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEngineering:
    """The text is shortened: past a threshold, everything between the task and the last exchange becomes a summary.

    The summary is an extract: a line per call and its answer. No model writes it, so it costs nothing here, which favours this
    policy in comparisons. Whatever follows a changed text has to be computed again.
    """

    threshold: int | None = SUMMARY_TOKENS
    """Tokens of the text; the header with which the assistant begins counts. None: the text is never shortened."""
    header_tokens: int = HEADER_TOKENS
    name: str = "text_engineering"

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.threshold is not None:
            _check("threshold", self.threshold)

    def __call__(self, messages: Sequence[Message], count: Count) -> AgentRequest:
        """See `Policy`."""
        if self.threshold is None:
            return AgentRequest(list(messages))
        opening = _opening(messages)
        kept = opening
        length = 0
        for number, message in enumerate(messages):
            length += count(message)
            if ends_request(messages, number) and length + self.header_tokens > self.threshold:
                latest = _last_exchange(messages, number)
                if latest > kept:
                    kept = latest
                    length = sum(map(count, [*_shortened(messages, opening, kept), *messages[kept : number + 1]]))
        return AgentRequest([*_shortened(messages, opening, kept), *messages[kept:]])


def standard(threshold: int | None = None) -> TextEngineering:
    """The text as it is, in ordinary requests. `threshold`: a model's limit, past which the text is summarised; None: never."""
    return TextEngineering(threshold=threshold, name="standard")


def _opening(messages: Sequence[Message]) -> int:
    """Leading messages that are never summarised: system messages and the task."""
    number = 0
    while number < len(messages) and messages[number]["role"] in _OPENING_ROLES:
        number += 1
        if messages[number - 1]["role"] == "user":
            break
    return number


def _last_exchange(messages: Sequence[Message], end: int) -> int:
    """The last turn of the assistant up to `end`; 0 if there is none."""
    return next((number for number in range(end, -1, -1) if messages[number]["role"] == "assistant"), 0)


def _shortened(messages: Sequence[Message], opening: int, kept: int) -> list[Message]:
    """What stands before message `kept`: the opening, and a summary of what follows it."""
    head = list(messages[:opening])
    if kept == opening:
        return head
    summary = summary_of(messages[opening:kept])
    if head and head[-1]["role"] == "user" and isinstance(head[-1]["content"], str):
        # Some templates want users and assistants in turn.
        return [*head[:-1], {**head[-1], "content": f"{head[-1]['content']}\n\n{summary}"}]
    return [*head, {"role": "user", "content": summary}]


def summary_of(messages: Sequence[Message]) -> str:
    """One line per message, of the last ones; calls and beginnings of answers."""
    lines = [line for message in messages for line in _lines(message)]
    more = [f"({len(lines) - _SUMMARY_LINES} earlier lines are left out)"] if len(lines) > _SUMMARY_LINES else []
    return "\n".join([f"Summary of {len(messages)} earlier messages:", *more, *lines[-_SUMMARY_LINES:]])


def _lines(message: Message) -> Iterator[str]:
    text = text_of(message.get("content"))
    if message["role"] == "tool":
        yield f"  -> {_cut(text)} ({len(text)} characters)"
        return
    if text.strip():
        yield f"- {message['role']}: {_cut(text)}"
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        yield f"- called {function['name']} {_cut(text_of(function.get('arguments', '')))}"


def _cut(text: str) -> str:
    words = " ".join(text[: 4 * _LINE].split())
    return words if len(words) <= _LINE else words[:_LINE] + "..."


def text_of(content: Any) -> str:
    """A content as one text: its parts joined, other objects as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return json.dumps(content)


def estimated(bytes_per_token: float, *, per_message: int = 4) -> Count:
    """A count for those who have no tokenizer: bytes of all texts and calls, and some tokens for header and end."""

    def count(message: Message) -> int:
        text = text_of(message.get("content")) + "".join(json.dumps(call) for call in message.get("tool_calls", ()))
        return per_message + round(len(text.encode("utf-8", "surrogatepass")) / bytes_per_token)

    return count


def _check(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(found=f"{name}={value!r}", required="an integer of at least 1", remedy=f"change {name}")
