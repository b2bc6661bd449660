"""What a chat consists of, read from the records of corpora and from requests: the only reader of turns.

Whatever may decide the text is kept for the template or refused by its place, such as `messages[2].content[0]`. Nothing here
knows a template: `template.py` decides in which of two equal forms a turn is written (a text or parts of it, arguments as an
object or as JSON).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Turn = dict[str, Any]

#: what the thoughts of an assistant are called
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
#: what a turn without any text may have
_NO_CONTENT = {"role", "name", "id", "tool_call_id"}
#: hints for caches, which are no text
_HINTS = {"cache_control"}
#: of a part of a content
_PART_KEYS = {"type", "text"} | _HINTS
#: the names of ShareGPT and of those that follow it
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
#: a record's fields that are read besides its turns
RECORD_FIELDS = ("tools", "documents", "chat_template_kwargs")
#: a record's fields that would change the text and have no place in a template, with what to do about each
REFUSED_FIELDS = {
    "functions": "write them as `tools`, each as {'type': 'function', 'function': ...}",
    "system": "write it as the first turn, with the role system",
    "system_prompt": "write it as the first turn, with the role system",
    "chat_template": "put the template into the tokenizer's folder",
}
#: what a record may not give to a template by `chat_template_kwargs`, because something else does
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now"}


class ChatError(Exception):
    """A chat that cannot be written, or whose assistant turns cannot be told from the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Everything that a template may write."""

    messages: list[Turn]
    """At least one turn, in plain JSON values and without fields that are null."""
    tools: list[dict[str, Any]] | None = None
    """None: the record does not have any, which is not the same to all templates as an empty list."""
    documents: list[dict[str, Any]] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """More values for the template, by name."""


def read_chat(record: Mapping[str, Any], key: str) -> Chat:
    """The chat of a record, whose turns are under `key`. Raises `ChatError` with the place of what cannot be used."""
    try:
        return _read(record, key)
    except RecursionError:
        raise ChatError(f"{key} is nested too deeply") from None


def _read(record: Mapping[str, Any], key: str) -> Chat:
    for name, remedy in REFUSED_FIELDS.items():
        if name != key and record.get(name) not in (None, "", []):
            raise ChatError(f"the record's field {name!r} would not reach the chat template: {remedy}")
    messages = _unpacked(record.get(key))
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"{key} is {_shown(messages)}, not a list of turns")
    values = _unpacked(record.get("chat_template_kwargs")) or {}
    if not isinstance(values, dict) or values.keys() & _RESERVED:
        raise ChatError(f"chat_template_kwargs is {_shown(values)}, not an object of values for the template")
    return Chat(
        messages=read_turns(messages, key),
        tools=_objects(record.get("tools"), "tools"),
        documents=_objects(record.get("documents"), "documents"),
        values=_checked(values, "chat_template_kwargs"),
    )


def read_turns(messages: Sequence[Any], place: str = "messages") -> list[Turn]:
    """All turns of a chat. Raises `ChatError`."""
    return [_turn(message, f"{place}[{nth}]") for nth, message in enumerate(messages)]


def texts_of(value: Any) -> list[str]:
    """All strings in a value, names of fields included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *texts_of(item))]
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def _turn(message: Any, place: str) -> Turn:
    if not isinstance(message, dict):
        raise ChatError(f"{place} is {_shown(message)}, not an object with a role")
    turn: Turn = _checked({key: value for key, value in message.items() if value is not None}, place)
    if "role" not in turn and isinstance(turn.get("from"), str) and "content" not in turn:
        sender = turn.pop("from")
        turn = {"role": _SHAREGPT_ROLES.get(sender, sender), "content": turn.pop("value", ""), **turn}
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError(f"{place} has the role {_shown(role)}, not a name")
    if "content" in turn:
        turn["content"] = _content(turn["content"], f"{place}.content", of_tool=role == "tool")
    if "tool_calls" in turn:
        calls = _objects(turn["tool_calls"], f"{place}.tool_calls") or []
        turn["tool_calls"] = [_call(call, f"{place}.tool_calls[{nth}]") for nth, call in enumerate(calls)]
    if not turn.keys() & {"content", "tool_calls", *REASONING_FIELDS} and not turn.keys() <= _NO_CONTENT:
        raise ChatError(f"{place} has no content: its fields are {sorted(turn)}")
    return turn


def _content(content: Any, place: str, *, of_tool: bool) -> Any:
    """A text, or parts of one; the answer of a tool may be any object, which templates write as JSON."""
    if isinstance(content, str) or (of_tool and (isinstance(content, dict) or _are_objects(content))):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{place} is {_shown(content)}, neither a text nor a list of parts")
    return [_part(part, f"{place}[{nth}]") for nth, part in enumerate(content)]


def _are_objects(content: Any) -> bool:
    """Whether this is a list of objects that are no parts."""
    return isinstance(content, list) and all(isinstance(item, dict) and not item.keys() & {"type", "text"} for item in content)


def _part(part: Any, place: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    kind, text = fields.get("type", "text"), fields.get("text")
    if kind != "text" or not isinstance(text, str):
        raise ChatError(f"{place} is {_shown(part)}, and only text is supported")
    if unknown := sorted(fields.keys() - _PART_KEYS):
        raise ChatError(f"{place} has the field {unknown[0]!r}, which would not reach the chat template")
    return {"type": "text", "text": text}


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A call without fields that are null; those of its arguments are data and stay."""
    fields = {key: value for key, value in call.items() if value is not None}
    if "function" in fields:
        function = _unpacked(fields["function"])
        if not isinstance(function, dict):
            raise ChatError(f"{place}.function is {_shown(function)}, not an object")
        fields["function"] = {key: value for key, value in function.items() if value is not None}
    inner = fields.get("function", fields)
    if not isinstance(inner.get("name"), str):
        raise ChatError(f"{place} has the name {_shown(inner.get('name'))}, not a text")
    if not isinstance(inner.get("arguments", {}), dict | str):
        raise ChatError(f"{place} has the arguments {_shown(inner['arguments'])}, neither an object nor its JSON")
    return fields


def _objects(value: Any, place: str) -> list[dict[str, Any]] | None:
    """A list of objects; it, and each of them, may be given as JSON. None stays None."""
    value = _unpacked(value)
    if value is None or value == "":
        return None
    if not isinstance(value, list):
        raise ChatError(f"{place} is {_shown(value)}, not a list of objects")
    items = [_unpacked(item) for item in value]
    for nth, item in enumerate(items):
        if not isinstance(item, dict):
            raise ChatError(f"{place}[{nth}] is {_shown(item)}, not an object")
    checked: list[dict[str, Any]] = _checked(items, place)
    return checked


def _unpacked(value: Any) -> Any:
    """A value that a column of texts holds as JSON."""
    if isinstance(value, str) and (value.lstrip()[:1] in ("[", "{") or value.strip() == "null"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _checked(value: Any, place: str) -> Any:
    """`value`, if it consists of what JSON has: anything else, a date for example, would be written as Python shows it."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ChatError(f"{place} has the name {_shown(key)}, not a text")
        return {key: _checked(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, f"{place}[{nth}]") for nth, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ChatError(f"{place} is {_shown(value)}, which JSON cannot hold; write it as a text")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str | list | dict | bool | int | float):
        return json.dumps(value, default=repr, skipkeys=True)[:80]
    return f"a {type(value).__name__} ({str(value)[:40]})"
