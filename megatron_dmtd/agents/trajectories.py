"""Recorded trajectories of agents: files of JSON lines, each a list of OpenAI's messages, or an object with one and `tools`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dmtd.agents.policies import Message, ends_request
from megatron_dmtd.chats.turns import Chat, ChatError, read_chat
from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.files import write_atomically

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REQUIRED = (
    'a line per trajectory: a list of OpenAI messages, or an object such as {"messages": [...], "tools": [...]}, which begins '
    "with a system message or the user and in which every tool response follows the call that it answers"
)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One recorded run of an agent."""

    name: str
    """Its `id`, or the number of its line."""
    chat: Chat

    @property
    def messages(self) -> list[Message]:
        """All of them, with what the assistant has answered."""
        return self.chat.messages

    @property
    def turns(self) -> list[int]:
        """How many messages each request held."""
        return [number + 1 for number in range(len(self.messages)) if ends_request(self.messages, number)]

    def body(self, *, sends_tools: bool) -> dict[str, Any]:
        """The fields of every request besides its messages."""
        fields: dict[str, Any] = {"tools": self.chat.tools} if sends_tools and self.chat.tools else {}
        return fields | ({"chat_template_kwargs": self.chat.values} if self.chat.values else {})

    def marked(self, mark: str) -> Trajectory:
        """The same with a mark before its first text, so that no request finds what others have cached."""
        first = dict(self.messages[0])
        content = first["content"]
        first["content"] = f"{mark}\n{content}" if isinstance(content, str) else [{"type": "text", "text": f"{mark}\n"}, *content]
        return Trajectory(self.name, replace(self.chat, messages=[first, *self.messages[1:]]))


def read_trajectories(path: Path) -> list[Trajectory]:
    """All trajectories of a file. Raises `DataError`, which names the line and the message that cannot be used."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(found=f"{path}: {error}", required="a readable file in UTF-8", remedy="correct the path") from error
    found: dict[str, Trajectory] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        refusal = Refusal(DataError, required=_REQUIRED, remedy=f"correct or remove line {number} of {path}")
        try:
            one = _trajectory(line, str(number))
        except ChatError as error:
            raise refusal(f"{path}, line {number}: {error}") from None
        if one.name in found:
            raise refusal(f"{path}, line {number}: a second trajectory with the id {one.name!r}")
        found[one.name] = one
    if not found:
        raise DataError(found=f"{path}: no trajectories", required=_REQUIRED, remedy="record some, or write an example")
    return list(found.values())


def write_trajectories(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write such a file, atomically. Raises `OSError`."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def _trajectory(line: str, name: str) -> Trajectory:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"no JSON ({error})") from None
    record = {"messages": record} if isinstance(record, list) else record
    if not isinstance(record, dict) or "messages" not in record:
        raise ChatError(f"{line[:60]!r} is neither a list nor an object with messages")
    if record.get("documents"):
        raise ChatError("the field documents has no place in requests")
    chat = read_chat(record, "messages")
    _check_order(chat.messages)
    own = record.get("id", name)
    if not isinstance(own, str | int) or isinstance(own, bool):
        raise ChatError(f"the id {own!r} is neither a text nor a number")
    return Trajectory(str(own), chat)


def _check_order(messages: Sequence[Message]) -> None:
    """Accept roles in an order that requests could have, or raise `ChatError`."""
    first = messages[0]
    if first["role"] not in ("system", "developer", "user") or not first.get("content"):
        raise ChatError(f"messages[0] has the role {first['role']!r}, or no content")
    calls: list[Any] = []
    may_answer = False
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES:
            raise ChatError(f"messages[{number}] has the role {role!r}, which is none of {', '.join(_ROLES)}")
        _check_content(message, number)
        if role == "tool":
            _check_response(message, number, calls, may_answer=may_answer)
            continue
        if calls:
            raise ChatError(f"messages[{number}] comes before the call {calls[0]!r} has been answered")
        may_answer = bool(message.get("tool_calls")) if role == "assistant" else False
        calls = [call["id"] for call in message.get("tool_calls", ()) if call.get("id") is not None]
    if number == 0 and first["role"] != "user":
        raise ChatError("messages has a system message alone")


def _check_content(message: Message, number: int) -> None:
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ChatError(f"messages[{number}] has no content and calls no tool")
    if not (content is None or isinstance(content, str) or _has_texts(content)):
        raise ChatError(f"messages[{number}].content is neither a text nor a list of texts; write it as JSON in a text")


def _has_texts(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(isinstance(part.get("text"), str) for part in content)


def _check_response(message: Message, number: int, calls: list[Any], *, may_answer: bool) -> None:
    """Accept a tool response after these calls that are still open, and close its own; or raise `ChatError`."""
    if not may_answer:
        raise ChatError(f"messages[{number}] is a tool response, but no turn of the assistant before it calls a tool")
    own = message.get("tool_call_id")
    if own is None:
        return
    if own not in calls:
        raise ChatError(f"messages[{number}] answers the call {own!r}, which is not open")
    calls.remove(own)
