"""The pictures of docs/cache_operations.md, drawn from the values that the engine itself uses: timelines, closures, keys of
nodes, and the policy. SVG, as text that does not depend on libraries, so that a test can tell whether the files are current.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from megatron_dmtd.agents.policies import Message, RollingDrop, ends_request
from megatron_dmtd.inference.cache_ops.closure import missing_cycles
from megatron_dmtd.inference.cache_ops.program import Timeline, parse_program
from megatron_dmtd.infra.files import write_atomically

#: the worked example of the page: eight tokens
NUM_TOKENS = 8
PROGRAM = [
    {"after": 4, "drop": [[0, 1]]},
    {"after": 4, "reposition": True},
    {"after": 7, "drop": [[2, 3]]},
    {"after": 7, "reposition": True},
]
#: another history of the same text, and what is missing of the first one's
OTHER_PROGRAM = [{"after": 4, "drop": [[0, 1]]}, {"after": 6, "drop": [[3, 4]]}]
EVICTED = (0, 5, 6)

_BLUE, _ORANGE, _GREY, _INK = "#3875b3", "#d9660d", "#e6e6e6", "#222222"
_CELL, _MARGIN = 34, 20


class _Drawing:
    """Shapes of an SVG."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *, fill: str, edge: str = "#999999") -> None:
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{edge}" stroke-width="0.7"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], *, colour: str = _INK, width: float = 1.5) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def text(self, x: float, y: float, text: str, *, colour: str = _INK, size: int = 12, anchor: str = "middle") -> None:
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, width: float, height: float) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" font-family="sans-serif">'
        return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *self._shapes, "</svg>"]) + "\n"


def _timeline(program: object) -> Timeline:
    return Timeline(parse_program(program, NUM_TOKENS), 1, NUM_TOKENS + 1)


def seen_positions(timeline: Timeline, query: int) -> dict[int, int]:
    """The tokens that a raw query sees, itself included, and their positions there."""
    positions = timeline.positions(timeline.stage_of(query))
    return {token: int(positions[token]) for token in range(query + 1) if timeline.expiry[token] > query or token == query}


def _grid(drawing: _Drawing, timeline: Timeline, rows: Sequence[int], colours: dict[int, str], top: float) -> None:
    """Rows read columns; a cell holds the position at which the key is seen. Lines where segments begin."""
    left = _MARGIN + 60
    for token in range(NUM_TOKENS):
        drawing.text(left + (token + 0.5) * _CELL, top - 6, str(token))
    for index, query in enumerate(rows):
        y = top + index * _CELL
        drawing.text(left - 8, y + 0.65 * _CELL, f"token {query}", anchor="end")
        seen = seen_positions(timeline, query)
        for token in range(NUM_TOKENS):
            is_seen = token in seen
            drawing.box(left + token * _CELL, y, _CELL, _CELL, fill=colours[token] if is_seen else "white", edge="#cccccc")
            if is_seen:
                drawing.text(left + (token + 0.5) * _CELL, y + 0.65 * _CELL, str(seen[token]), colour="white")
        if index and timeline.segment_of(query) != timeline.segment_of(rows[index - 1]):
            drawing.line([(left - 60, y), (left + NUM_TOKENS * _CELL, y)], width=2)


def _legend(drawing: _Drawing, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
    for number, (colour, meaning) in enumerate(entries):
        drawing.box(x, y + 22 * number, 14, 14, fill=colour)
        drawing.text(x + 22, y + 22 * number + 12, meaning, anchor="start")


def segments_picture() -> str:
    """The active cache of the worked example, query by query, with the positions at which it is seen."""
    drawing, timeline = _Drawing(), _timeline(PROGRAM)
    colours = dict.fromkeys(range(NUM_TOKENS), _BLUE)
    drawing.text(_MARGIN, 22, "Rows read columns; numbers are positions; lines are where segments begin", anchor="start", size=13)
    _grid(drawing, timeline, range(NUM_TOKENS), colours, 56)
    x = _MARGIN + 60 + NUM_TOKENS * _CELL + 24
    for number, head in enumerate([0, *timeline.cuts]):
        births = [int(timeline.birth[token]) for token in range(head, (*timeline.cuts, NUM_TOKENS)[number])]
        drawing.text(x, 56 + head * _CELL + 22, f"segment {number + 1}: born at {births}", anchor="start")
    return drawing.svg(x + 250, 70 + NUM_TOKENS * _CELL)


def recovery_picture() -> str:
    """What is computed when some tokens are missing: the last one, and those that something computed reads."""
    drawing, timeline = _Drawing(), _timeline(PROGRAM)
    is_cached = np.array([token not in EVICTED and token < NUM_TOKENS - 1 for token in range(timeline.num_tokens)])
    computed = missing_cycles(timeline, is_cached, NUM_TOKENS, all_of_them=False)
    colours = {token: _ORANGE if token in computed else _BLUE for token in range(NUM_TOKENS)}
    evicted = ", ".join(map(str, EVICTED))
    drawing.text(_MARGIN, 22, f"Tokens {evicted} were evicted; these rows are computed, in one pass", anchor="start", size=13)
    _grid(drawing, timeline, computed, colours, 56)
    y = 56 + len(computed) * _CELL + 20
    unread = [token for token in EVICTED if token not in computed]
    entries = [(_ORANGE, "computed"), (_BLUE, "read from the cache")]
    _legend(drawing, _MARGIN, y, entries)
    words = f"missing and not needed: {', '.join(map(str, unread))}" if unread else "all missing tokens are needed"
    drawing.text(_MARGIN + 220, y + 12, words, anchor="start")
    return drawing.svg(_MARGIN + 60 + NUM_TOKENS * _CELL + 130, y + 60)


def tree_picture() -> str:
    """Two requests of the same text with other operations: they share nodes up to the first one that differs."""
    drawing = _Drawing()
    paths = [
        [(timeline.node_key(token), token) for token in range(NUM_TOKENS)]
        for timeline in map(_timeline, (PROGRAM, OTHER_PROGRAM))
    ]
    shared = next(number for number in range(NUM_TOKENS) if paths[0][number] != paths[1][number])
    width, step, top = 58, 84, 60
    drawing.text(_MARGIN, 22, "A node is a token and what takes effect before it", anchor="start", size=13)
    for row, path in enumerate(paths):
        for number, (key, token) in enumerate(path):
            if row and number < shared:
                continue
            x, y = _MARGIN + number * step, top + row * 110 + (55 if number < shared else 0)
            if number:
                before = top + row * 110 + 15 if number > shared else top + 70
                drawing.line([(x - step + width, before), (x, y + 15)], width=1)
            drawing.box(x, y, width, 30, fill=_GREY if key is None else "#fab86b")
            drawing.text(x + width / 2, y + 20, f"token {token}")
            for line, words in enumerate(_words(key)):
                drawing.text(x + width / 2, y + 44 + 14 * line, words, size=11)
    return drawing.svg(2 * _MARGIN + NUM_TOKENS * step, top + 110 + 90)


def _words(key: object) -> list[str]:
    """What takes effect before a node."""
    if not isinstance(key, tuple):
        return []
    return [
        "reposition" if one is True else "drop " + ", ".join(str(b) if e == b + 1 else f"{b}-{e - 1}" for b, e in one)
        for one in key
    ]


def agent_history(num_responses: int = 60) -> list[Message]:
    """A history of turns of one call each; `agent_count` gives their sizes."""
    messages: list[Message] = [{"role": "system", "content": "", "size": 300}, {"role": "user", "content": "", "size": 100}]
    for number in range(num_responses):
        messages.append({"role": "assistant", "content": "", "tool_calls": [], "size": 60})
        messages.append({"role": "tool", "content": "", "size": 200 + 97 * (number * 7 % 11)})
    return messages


def agent_count(message: Message) -> int:
    """Tokens of a message of `agent_history`."""
    return int(message["size"])


def lengths_over_time(messages: Sequence[Message], policy: RollingDrop) -> list[tuple[int, int, int]]:
    """After each request: tokens of the text, active tokens, next position."""
    cache = policy(messages, agent_count).cache
    assert cache is not None
    found, text, active, position = [], 0, 0, 0
    for number, message in enumerate(messages):
        size = agent_count(message)
        text, active, position = text + size, active + size, position + size
        active -= sum(agent_count(messages[dropped]) for dropped in cache["drop"].get(str(number), ()))
        position = active if number in cache["reposition"] else position
        if ends_request(messages, number):
            found.append((text, active, position))
    return found


def rolling_picture() -> str:
    """Text, active cache and positions of an agent over its turns."""
    drawing, policy = _Drawing(), RollingDrop(reposition_tokens=16_000)
    points = lengths_over_time(agent_history(), policy)
    left, top, width, height = 70, 50, 560, 300
    most = -(-max(map(max, points)) // 10_000) * 10_000
    drawing.text(
        _MARGIN,
        22,
        f"rolling_drop: {policy.keep} responses stay, threshold {policy.reposition_tokens:,}",
        anchor="start",
        size=13,
    )
    for tick in range(0, most + 1, 10_000):
        y = top + height * (1 - tick / most)
        drawing.line([(left, y), (left + width, y)], colour="#dddddd", width=1)
        drawing.text(left - 8, y + 4, f"{tick:,}", anchor="end", size=11)
    for turn in range(0, len(points), 10):
        drawing.text(left + width * turn / (len(points) - 1), top + height + 18, str(turn), size=11)
    drawing.text(left + width / 2, top + height + 36, "turn")
    for column, colour in enumerate((_GREY.replace("e6", "88"), _BLUE, _ORANGE)):
        line = [
            (round(left + width * turn / (len(points) - 1), 1), round(top + height * (1 - point[column] / most), 1))
            for turn, point in enumerate(points)
        ]
        drawing.line(line, colour=colour, width=2)
    _legend(
        drawing, left + 20, top + 10, [("#888888", "tokens of the text"), (_BLUE, "active tokens"), (_ORANGE, "next position")]
    )
    return drawing.svg(left + width + _MARGIN, top + height + 50)


PICTURES = {
    "cache_segments.svg": segments_picture,
    "cache_recovery.svg": recovery_picture,
    "cache_tree.svg": tree_picture,
    "cache_rolling.svg": rolling_picture,
}


def write_pictures(folder: Path) -> list[Path]:
    """Write all pictures to a folder, each atomically. Raises `OSError`."""
    for name, draw in PICTURES.items():
        write_atomically(folder / name, draw())
    return [folder / name for name in PICTURES]
