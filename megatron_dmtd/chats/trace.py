"""Where in a written chat each message lies: loops over messages are made to leave marks, one at both ends of a message's turn.

The marks are added to the parsed template, not to the messages, so white space control, tests of contents and lengths see nothing
of them. A template that does something with a text that it has written in a loop (trims it, say) changes once marks are inside;
that is found by taking the marks out again and comparing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, Template, nodes

Span = tuple[int, int]

#: characters for private use: one for the beginning of each message, one for every end
_FIRST_MARK, _END_MARK = 0xF0000, 0xFFFFD
MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_END_MARK)}]")
MAX_TRACED_MESSAGES = _END_MARK - _FIRST_MARK
#: names of the two functions that a traced template calls
BEGINS, ENDS = "mark_of_a_turn_that_begins", "mark_of_a_turn_that_ends"


def traced(environment: Environment, source: str) -> Template:
    """The template `source`, with calls of `BEGINS` and `ENDS` around the body of every loop."""
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            loop.body = [_call(BEGINS, loop.target.name), *loop.body, _call(ENDS, loop.target.name)]
    return environment.from_string(tree)


def _call(function: str, variable: str) -> nodes.Output:
    name, argument = nodes.Name(function, "load"), nodes.Name(variable, "load")
    return nodes.Output([nodes.Call(name, [argument], [], None, None)])


def marking(messages: Sequence[Any]) -> dict[str, Callable[[Any], str]]:
    """The two functions, for these messages: what else a loop runs over gets no mark."""
    numbers = {id(message): number for number, message in enumerate(messages)}

    def begins(value: Any) -> str:
        number = numbers.get(id(value))
        return "" if number is None else chr(_FIRST_MARK + number)

    def ends(value: Any) -> str:
        return "" if id(value) not in numbers else chr(_END_MARK)

    return {BEGINS: begins, ENDS: ends}


def spans_of(marked: str, num_messages: int) -> tuple[str, list[Span | None]]:
    """The text without marks, and the span of each message; None for one that is written in no place or in several."""
    spans: list[Span | None] = [None] * num_messages
    several: set[int] = set()
    for number, begin, end in _turns(marked):
        if begin < end:
            several |= {number} if spans[number] is not None else set()
            spans[number] = begin, end
    for number in several:
        spans[number] = None
    return MARKS.sub("", marked), spans


def _turns(marked: str) -> Iterator[tuple[int, int, int]]:
    """(message, begin, end) of each turn, in characters without marks."""
    open_turns: list[tuple[int, int]] = []
    for number_of_marks, found in enumerate(MARKS.finditer(marked)):
        place, mark = found.start() - number_of_marks, ord(found.group())
        if mark != _END_MARK:
            open_turns.append((mark - _FIRST_MARK, place))
        elif open_turns:
            number, begin = open_turns.pop()
            yield number, begin, place
