"""An example trajectory: an agent that greps and reads real sources, by default those of Python's standard library.

No model writes it. The agent follows names: it searches for one, reads around a hit, and goes on with a name that it has read
there. Everything that its tools answer is text on this machine, so the trajectory is a function of the sources and the arguments.
"""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import ConfigError

Message = dict[str, Any]

_SYSTEM = (
    "You are a coding agent. You answer questions about a code base by searching and reading it with your tools, one step after "
    "the other, and name the files and lines that support your answer."
)
_NAME = re.compile(r"\b(?:def|class) ([A-Za-z_]\w{4,})")
_CALLED = re.compile(r"\b([a-z_]\w{5,})\(")
#: hits of a search, names in a listing, characters of a line
_MOST_HITS, _MOST_NAMES, _MOST_CHARACTERS = 12, 40, 160
#: each so many turns, two tools are called at once
_PARALLEL_EVERY = 9
#: larger files are left alone
_MOST_BYTES = 200_000


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("list_directory", "Names of the files in a folder.", path="string"),
    _tool("grep", "Lines of all files that hold a word, each with its file and number.", word="string"),
    _tool("read_file", "Some lines of a file.", path="string", first="integer", last="integer"),
]


@dataclass
class _Sources:
    """Python files of one folder."""

    folder: Path
    files: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = sorted(path for path in self.folder.glob("*.py") if path.is_file() and path.stat().st_size <= _MOST_BYTES)
        self.files = {path.name: path.read_text(encoding="utf-8", errors="replace").splitlines() for path in paths}
        self.files = {name: lines for name, lines in self.files.items() if lines}
        if not self.files:
            raise ConfigError(
                found=f"no Python files in {self.folder}",
                required="a folder with some, each of at most 200 kB",
                remedy="choose another folder",
            )

    def hits(self, word: str) -> list[tuple[str, int]]:
        """Files and lines, from 0, that hold a word."""
        pattern = re.compile(rf"\b{re.escape(word)}\b")
        return [
            (name, row)
            for name, lines in self.files.items()
            for row, line in enumerate(lines)
            if word in line and pattern.search(line)
        ]

    def listed(self) -> str:
        """What `list_directory` answers."""
        names = list(self.files)
        more = [f"... and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
        return "\n".join([*names[:_MOST_NAMES], *more])

    def found(self, hits: Sequence[tuple[str, int]]) -> str:
        """What `grep` answers."""
        lines = [f"{name}:{row + 1}: {self.files[name][row].strip()[:_MOST_CHARACTERS]}" for name, row in hits[:_MOST_HITS]]
        more = [f"... and {len(hits) - _MOST_HITS} more"] if len(hits) > _MOST_HITS else []
        return "\n".join([*lines, *more]) or "no lines"

    def read(self, name: str, first: int, last: int) -> str:
        """What `read_file` answers; lines from 0, the last one excluded."""
        rows = enumerate(self.files[name][first:last], start=first + 1)
        return "\n".join(f"{row:5} {line[:_MOST_CHARACTERS]}" for row, line in rows)


class _Agent:
    """Follows names through the sources."""

    def __init__(self, sources: _Sources, *, lines: int, seed: int) -> None:
        self.sources, self.lines, self.random = sources, lines, random.Random(seed)
        self.messages: list[Message] = []
        self.num_responses = 0
        self._followed: set[str] = set()
        names = [name for rows in sources.files.values() for row in rows for name in _NAME.findall(row)]
        self._names = sorted(set(names)) or [Path(next(iter(sources.files))).stem]
        self.word = self.another([])

    def another(self, candidates: Sequence[str]) -> str:
        """A name that has not been followed yet, one of the candidates if there is one."""
        fresh = sorted({name for name in candidates if name not in self._followed} or set(self._names) - self._followed)
        word = self.random.choice(fresh or self._names)
        self._followed.add(word)
        return word

    def ask(self) -> None:
        """The task."""
        task = f"Who uses `{self.word}`, what does it do, and on which other functions does it depend? Follow the calls."
        self.messages += [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]

    def act(self, text: str, *calls: tuple[str, dict[str, Any], str]) -> None:
        """A turn of the assistant with some calls, and what the tools answer."""
        made: list[dict[str, Any]] = []
        for name, arguments, _ in calls:
            function = {"name": name, "arguments": json.dumps(arguments)}
            made.append({"id": f"call_{self.num_responses + len(made)}", "type": "function", "function": function})
        self.messages.append({"role": "assistant", "content": text, "tool_calls": made})
        for call, (_, _, answer) in zip(made, calls, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        self.num_responses += len(calls)

    def search(self) -> list[tuple[str, int]]:
        """Look for the current name."""
        hits = self.sources.hits(self.word)
        self.act(f"I search for `{self.word}`.", ("grep", {"word": self.word}, self.sources.found(hits)))
        return hits

    def read(self, hits: Sequence[tuple[str, int]], *, most: int) -> None:
        """Read around one hit or two, and choose the next name there."""
        chosen = self.random.sample(hits, min(len(hits), most))
        calls: list[tuple[str, dict[str, Any], str]] = []
        called: list[str] = []
        for name, row in chosen:
            first = max(0, row - self.lines // 4)
            last = min(len(self.sources.files[name]), first + self.lines)
            text = self.sources.read(name, first, last)
            called += _CALLED.findall(text)
            calls.append(("read_file", {"path": name, "first": first + 1, "last": last}, text))
        places = " and ".join(f"{name}, line {row + 1}" for name, row in chosen)
        self.act(f"`{self.word}` occurs in {places}. I read what stands there.", *calls)
        self.word = self.another(called)


def example_trajectory(*, responses: int = 60, lines: int = 40, seed: int = 0, folder: Path | None = None) -> dict[str, Any]:
    """A record with `id`, `messages` and `tools`, as OpenAI's clients hold them.

    Args:
        responses: Tool responses, at least 3.
        lines: Lines of a file that the agent reads at once, at least 4; a line is about 12 tokens.
        seed: Another seed follows other names.
        folder: Python files to read. Default: the standard library.

    Raises:
        ConfigError: A number is too small, or the folder has no Python files.
    """
    for name, value, least in (("responses", responses, 3), ("lines", lines, 4)):
        if value < least:
            raise ConfigError(found=f"{name}={value}", required=f"at least {least}", remedy=f"change {name}")
    agent = _Agent(_Sources(folder or Path(sysconfig.get_paths()["stdlib"])), lines=lines, seed=seed)
    task = agent.word
    agent.ask()
    agent.act("I look around first.", ("list_directory", {"path": "."}, agent.sources.listed()))
    while agent.num_responses < responses:
        hits = agent.search()
        left = responses - agent.num_responses
        if hits and left:
            agent.read(hits, most=min(left, 2 if len(agent.messages) % _PARALLEL_EVERY == 0 else 1))
        elif not hits:
            agent.word = agent.another([])
    agent.messages.append({"role": "assistant", "content": f"I have followed `{task}` through {responses} answers of the tools."})
    return {"id": f"example-{responses}-{lines}-{seed}", "messages": agent.messages, "tools": TOOLS}
