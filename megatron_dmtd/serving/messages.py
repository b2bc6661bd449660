"""The turns of a chat, and cache operations on them, as a request has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from megatron_dmtd.errors import shown
from megatron_dmtd.serving.cache_fields import Drops, MessageNumbers
from megatron_dmtd.serving.fields import Fields, refuse_unless_silent

#: what this server does not have in a message or a part of one, with the values, besides null, that ask for nothing
_NOT_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"refusal": (), "annotations": ([],), "audio": (), "function_call": ()}
#: a hint for caching; prefixes are cached anyway
_HINTS = {"cache_control"}


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """See `Fields`."""
        if name == "type" and value != "text":
            raise ValueError(f"a part of type {shown(value)}: only text is taken here")
        return value is None or name in _HINTS


class Function(Fields):
    """What a tool call calls."""

    name: str
    arguments: str | dict[str, Any]
    """OpenAI's API has an object written as JSON in a text."""


class ToolCall(Fields):
    """A call that an assistant has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Fields):
    """One turn of a chat. Fields that a model's template may know, such as `name`, are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)] | None = None
    """Only an assistant that calls tools may have none."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default_factory=list)

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """See `Fields`."""
        if name in _NOT_IN_MESSAGES:
            refuse_unless_silent(f"a message's {name}", value, _NOT_IN_MESSAGES[name], param="messages")
        return value is None or name in _HINTS or name in _NOT_IN_MESSAGES

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required, but where an assistant has tool_calls")
        return self

    def as_turn(self) -> dict[str, Any]:
        """The message as a record of a corpus would hold it: without fields that the client left out."""
        turn = self.model_dump(exclude_unset=True)
        for call in turn.get("tool_calls", ()):
            call.setdefault("type", "function")
        return turn


class CacheOfMessages(Fields):
    """`cache` of a chat."""

    drop: Drops = Field(default_factory=dict)
    drop_message: Drops | None = None
    """Another name for `drop`."""
    reposition: MessageNumbers = Field(default_factory=list)
    """Messages after which the survivors move to positions from 0."""
