"""Fields of requests that edit the cache: by message numbers in chats, by token indices in completions (docs/serving.md).

Only their form is checked here. What message numbers mean is found once the chat is written (`message_cache`), and operations on
tokens are read by the engine's own reader, so that HTTP and Python refuse the same.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from megatron_dmtd.errors import shown

#: Message numbers that one list may hold; a chat has no more messages.
MAX_NUMBERS = 4096
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_NUMBERS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# Of parts that are lists of lists only the kind is published: tests made of deeper schemas take minutes.
_DROPS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "array"},
    "description": "Lists of message numbers, counted from 0, by the number of the message after which they are dropped",
}
_PROGRAM_SCHEMA = {
    "type": "array",
    "description": 'Operations such as {"after": 37, "drop": [[3, 9]]} or {"after": 52, "reposition": true}; for several prompts '
    "a list of such lists, or null, for each prompt",
}


def _drops(value: Any) -> dict[int, list[int]]:
    if not isinstance(value, dict) or len(value) > MAX_NUMBERS:
        raise ValueError(f"Input should be an object of at most {MAX_NUMBERS} lists of message numbers, by message number")
    for name in value:
        if not _NUMBER.fullmatch(name):
            raise ValueError(f"Input should have message numbers, counted from 0, as names, not {shown(name)}")
    return {int(name): _numbers(numbers, f" in {name}") for name, numbers in value.items()}


def _numbers(value: Any, where: str = "") -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_NUMBERS:
        raise ValueError(f"Input should be a list of at most {MAX_NUMBERS} message numbers{where}, not {shown(value)}")
    numbers = [int(number) if isinstance(number, float) and number.is_integer() else number for number in value]
    for index, number in enumerate(numbers):
        if type(number) is not int or number < 0:
            raise ValueError(
                f"Input should have message numbers, counted from 0, not {shown(value[index])} at index {index}{where}"
            )
    return numbers


def _programs(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"Input should be a list of operations, or for several prompts a list of such lists, not {shown(value)}")
    return value


Drops = Annotated[dict[int, list[int]], PlainValidator(_drops), WithJsonSchema(_DROPS_SCHEMA)]
"""Message numbers, by the number of the message after which they are dropped."""
MessageNumbers = Annotated[list[int], PlainValidator(_numbers), WithJsonSchema(_NUMBERS_SCHEMA)]
Programs = Annotated[
    list[Any],
    PlainValidator(_programs),
    WithJsonSchema(_PROGRAM_SCHEMA),
]
"""A list of operations in JSON form, or for several prompts one such list, or null, for each."""
