"""Types of fields in requests, and the object that they stand in. Types are those of JSON: a number in quotes is not a number."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from megatron_dmtd.errors import shown
from megatron_dmtd.serving.faults import RequestError

#: Work per token grows with these.
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_BIASED_TOKENS, MAX_TOP_LOGPROBS = 64, 1000, 1024, 1024, 20
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def within(**bounds: float) -> Any:
    """A range for the schema; the engine checks it."""
    return Field(json_schema_extra=dict(bounds))


def _prompt(value: Any) -> str | list[str] | list[list[int]]:
    """A text, texts, or lists of ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if ids := _ids(value):
            return [ids]
        lists = list(takewhile(bool, map(_ids, value)))
        if len(lists) == len(value):
            return lists
    raise ValueError("Input should be a text, texts, token ids, or lists of token ids; no list empty")


def _ids(items: Any) -> list[int]:
    """A list of ids; empty if it is none."""
    if not isinstance(items, list):
        return []
    if not all(type(item) is int for item in items):
        items = [_whole(item) for item in items]
    return items if all(type(item) is int for item in items) else []


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is the integer 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"Input should be an object of at most {MAX_BIASED_TOKENS} numbers by token id")
    for name, bias in value.items():
        if not _TOKEN_ID.fullmatch(name) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"Input should have a number for each token id, not {shown(bias)} for {shown(name)}")
    return {int(name): float(bias) for name, bias in value.items()}


Prompt = Annotated[
    str | list[str] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
            "additionalProperties": {"type": "number", "minimum": -1e9, "maximum": 1e9},
            "maxProperties": MAX_BIASED_TOKENS,
        }
    ),
]
WHOLE = BeforeValidator(_whole)
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[Annotated[int, within(minimum=0), WHOLE]], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)]


class Fields(BaseModel):
    """An object in a request. Clients send null for fields that they leave out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _what_asks_for_something(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {name: value for name, value in fields.items() if not cls.asks_for_nothing(name, value)}
        if cls.model_config["extra"] == "forbid":
            # Here, and not by pydantic, which would describe each of a million.
            for name in kept:
                if name not in cls.model_fields:
                    raise ValueError(f"an unknown field {name[:100]}")
        return kept

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """Whether a field may be left out. Raises `RequestError` for what this server does not have."""
        return value is None


def refuse_unless_silent(name: str, value: Any, silent: tuple[Any, ...], *, param: str) -> None:
    if value is not None and not any(type(value) is type(other) and value == other for other in silent):
        raise RequestError(
            found=f"{name} = {shown(value)}",
            required="a request without it: this server does not have it",
            remedy=f"drop {name}",
            param=param,
        )
