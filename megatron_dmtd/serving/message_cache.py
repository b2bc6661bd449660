"""Cache operations on messages of a chat, as operations on the tokens of its text.

A message owns characters of the text (`chats/owners.py`), and a token belongs to the message in which it begins. An operation
acts once the last token of the message that triggers it has been computed, so that message still reads what it drops. What has
been dropped before is left out, which keeps the work linear in the size of the request.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_dmtd.chats.owners import OwnedText
from megatron_dmtd.errors import DataError, shown
from megatron_dmtd.serving.faults import BAD_OPERATIONS, RequestError

#: how the engine names an operation that it refuses
_OPERATION = re.compile(r"cache\[(\d+)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageOperations:
    """What a request says."""

    drop: dict[int, list[int]]
    """Numbers of messages, by the number of the message after which they are dropped."""
    reposition: list[int]
    """Numbers of messages after which the survivors move to positions from 0, rising."""
    drop_name: str
    """The field, for refusals."""
    reposition_name: str

    @property
    def triggers(self) -> list[int]:
        """All messages after which something happens, rising."""
        return sorted({*self.drop, *self.reposition})

    def check(self, num_messages: int) -> None:
        """Raises `RequestError` for a number that names no message, a drop of a later one, or repositions that do not rise."""
        for trigger, numbers in self.drop.items():
            self._check_number(trigger, num_messages, self.drop_name)
            for index, number in enumerate(numbers):
                self._check_number(number, num_messages, f"{self.drop_name}.{trigger}[{index}]")
                if number > trigger:
                    raise _refused(
                        f"{self.drop_name}.{trigger}[{index}]: message {number}, dropped after message {trigger}",
                        "only messages up to that one: none of the future",
                        self.drop_name,
                    )
        for index, number in enumerate(self.reposition):
            self._check_number(number, num_messages, f"{self.reposition_name}[{index}]")
            if index and number <= self.reposition[index - 1]:
                raise _refused(
                    f"{self.reposition_name}[{index}]: message {number} after message {self.reposition[index - 1]}",
                    "message numbers that rise",
                    self.reposition_name,
                )

    def _check_number(self, number: int, num_messages: int, place: str) -> None:
        if number >= num_messages:
            raise _refused(
                f"{place}: message {shown(number)}", f"one of the {num_messages} messages, counted from 0", place.split("[")[0]
            )

    def program(self, owned: OwnedText, token_starts: Sequence[int]) -> Program:
        """The operations on tokens.

        Args:
            owned: The chat's text; `check` has accepted its number of messages.
            token_starts: The character at which each token of the text begins.

        Raises:
            RequestError: A message is named that the chat template does not show.
        """
        starts = list(accumulate(token_starts, max))
        moved, dropped = set(self.reposition), set[int]()
        operations: list[dict[str, Any]] = []
        places: list[str] = []
        for trigger in self.triggers:
            # What was dropped before stays so.
            fresh = [number for number in dict.fromkeys(self.drop.get(trigger, ())) if number not in dropped]
            dropped.update(fresh)
            operation: dict[str, Any] = {"after": bisect_left(starts, self._span(owned, trigger)[1])}
            if fresh:
                operation["drop"] = [[bisect_left(starts, place) for place in self._span(owned, number)] for number in fresh]
            if trigger in moved:
                operation["reposition"] = True
            if len(operation) > 1:
                operations.append(operation)
                places.append(f"{self.reposition_name if trigger in moved else self.drop_name}, message {trigger}")
        return Program(operations, places.__getitem__)

    def _span(self, owned: OwnedText, number: int) -> tuple[int, int]:
        span = owned.spans[number]
        if span is None:
            raise _refused(
                f"message {number}, which cannot be told from the rest of the text that the model's chat template writes",
                "messages that the template writes one after the other",
                self.drop_name,
            )
        return span


@dataclass(frozen=True, slots=True)
class Program:
    """Operations on tokens."""

    operations: list[Any]
    places: Callable[[int], str]
    """Where operation i came from in the request."""

    def named(self, error: DataError) -> RequestError:
        """A refusal of the engine's, in the words of the request."""
        found = _OPERATION.sub(lambda match: self.places(int(match[1])), error.found)
        return RequestError(found=found, required=error.required, remedy=error.remedy, param="cache", code=BAD_OPERATIONS)


def _refused(found: str, required: str, place: str) -> RequestError:
    remedy = "correct the request's cache operations"
    return RequestError(found=found, required=required, remedy=remedy, param=place.split(".")[0], code=BAD_OPERATIONS)
