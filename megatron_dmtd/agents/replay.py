"""Replays of recorded trajectories under policies, turn by turn, and what is measured.

The recorded turns of the assistant stay what they are; of each request only the first token is asked for. So every policy
meets the same history, and the recorded answers are computed as a part of the next prompt, as after any answer that another
engine has written.

Agents that take turns share one cache: `interleave` trajectories advance together, one request of each after the other. Each run
of a trajectory begins with a mark of its own, so no run finds what another has cached.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dmtd.agents.clients import Client
from megatron_dmtd.agents.cost import Prices, cost
from megatron_dmtd.agents.policies import AgentRequest, Count, Policy
from megatron_dmtd.agents.trajectories import Trajectory
from megatron_dmtd.errors import ConfigError, DataError, DMTDError, Refusal
from megatron_dmtd.inference.cache_ops.usage import Usage
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.infra.json_lines import append, read_lines, to_line

#: the files of a replay
TURNS_FILE, SETTINGS_FILE = "turns.jsonl", "settings.json"
_DAMAGED = Refusal(DataError, required="a file that a replay wrote", remedy="remove the output folder, or choose another one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of a replay."""

    policy: str
    trajectory: str
    turn: int
    """From 0."""
    prompt_tokens: int
    new_tokens: int
    """Those that the prompt has more than that of the turn before; 0 where a policy has shortened the text."""
    prefill_tokens: int
    cached_tokens: int
    repos_tokens: int
    drop_skipped_tokens: int
    output_tokens: int
    """Of the recorded answer, as the policy counts them."""
    first_token_s: float
    active_tokens: int
    """Prompt tokens that the first new token sees."""
    active_is_exact: bool
    """False: estimated from the sizes of the messages that were dropped."""
    cost: float
    """At list prices, in their currency."""

    @property
    def held_tokens(self) -> int:
        """Tokens whose K and V the request has read or computed: what a cache must hold of it."""
        return self.cached_tokens + self.repos_tokens + self.prefill_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What is replayed, and how it is measured."""

    trajectories: Sequence[Trajectory]
    policies: Sequence[Policy]
    count: Count
    prices: Prices
    interleave: int = 1
    """Agents that share the cache at a time."""
    sends_tools: bool = False
    """Send the definitions of tools, for servers that take them."""
    mark: Callable[[], str] = lambda: f"[{uuid.uuid4().hex[:12]}]"

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.interleave < 1:
            raise ConfigError(found=f"interleave={self.interleave}", required="at least 1", remedy="change it")
        names = [policy.name for policy in self.policies]
        if not names or len(set(names)) < len(names):
            raise ConfigError(found=f"policies {names}", required="one or more, each once", remedy="name each once")

    @property
    def groups(self) -> list[tuple[Policy, list[Trajectory]]]:
        """The runs that take turns."""
        width = self.interleave
        starts = range(0, len(self.trajectories), width)
        return [(policy, list(self.trajectories[start : start + width])) for policy in self.policies for start in starts]

    @property
    def num_turns(self) -> int:
        """Requests of the whole replay."""
        return len(self.policies) * sum(len(trajectory.turns) for trajectory in self.trajectories)

    def played(self, client: Client, policy: Policy, group: Sequence[Trajectory]) -> Iterator[Turn]:
        """The turns of one group. Raises as `Client.answer`, with the place."""
        runs = [_Run(self, client, policy, trajectory) for trajectory in group]
        for turn in range(max(len(run.lengths) for run in runs)):
            for run in runs:
                if turn < len(run.lengths):
                    yield run.take(turn)


class _Run:
    """One trajectory under one policy."""

    def __init__(self, replay: Replay, client: Client, policy: Policy, trajectory: Trajectory) -> None:
        self.replay, self.client, self.policy = replay, client, policy
        self.trajectory = trajectory.marked(replay.mark())
        self.lengths = trajectory.turns
        self.fields = {"max_tokens": 1, "temperature": 0.0, **trajectory.body(sends_tools=replay.sends_tools)}
        self._sizes: dict[int, int] = {}
        self._last_prompt = 0

    def _count(self, message: Mapping[str, Any]) -> int:
        """The policy's count, kept for the messages of the history: a policy asks for all of them at every turn."""
        size = self._sizes.get(id(message))
        return size if size is not None else self.replay.count(dict(message))

    def take(self, turn: int) -> Turn:
        """The request of one turn, served and measured."""
        messages, end = self.trajectory.messages, self.lengths[turn]
        for message in messages[:end]:
            self._sizes.setdefault(id(message), self.replay.count(message))
        request = self.policy(messages[:end], self._count)
        body = {"messages": request.messages, **self.fields, **request.fields}
        try:
            answer = self.client.answer(body)
        except DMTDError as error:
            place = f"trajectory {self.trajectory.name!r}, policy {self.policy.name}, turn {turn} ({end} messages)"
            raise type(error)(found=f"{place}: {error.found}", required=error.required, remedy=error.remedy) from error
        usage = answer.usage
        output = self.replay.count(messages[end]) if end < len(messages) else 0
        new = max(0, usage.prompt_tokens - self._last_prompt)
        self._last_prompt = usage.prompt_tokens
        active = answer.active_tokens
        return Turn(
            policy=self.policy.name,
            trajectory=self.trajectory.name,
            turn=turn,
            prompt_tokens=usage.prompt_tokens,
            new_tokens=new,
            prefill_tokens=usage.prefill_tokens,
            cached_tokens=usage.cached_tokens,
            repos_tokens=usage.repos_tokens,
            drop_skipped_tokens=usage.drop_skipped_tokens,
            output_tokens=output,
            first_token_s=answer.first_token_s,
            active_tokens=self._active(request, usage) if active is None else active,
            active_is_exact=active is not None,
            cost=cost(usage, output, self.replay.prices),
        )

    def _active(self, request: AgentRequest, usage: Usage) -> int:
        """An estimate: the prompt without the share of the messages that were dropped."""
        if request.cache is None:
            return usage.prompt_tokens
        sizes = [self._count(message) for message in request.messages]
        dropped = {number for numbers in request.cache["drop"].values() for number in numbers}
        return round(usage.prompt_tokens * (1 - sum(sizes[number] for number in dropped) / sum(sizes)))


def run_replay(
    replay: Replay,
    client: Client,
    output: Path,
    *,
    settings: Mapping[str, Any],
    on_turn: Callable[[int], None] = lambda num_turns: None,
    fresh: Callable[[], Client] | None = None,
) -> list[Turn]:
    """Play everything, and append each turn to `turns.jsonl` in the folder `output`.

    An interrupted replay goes on where it stopped: groups whose turns are all there are kept, one that is incomplete is played
    again from its beginning, since what was cached of it may be gone.

    Args:
        replay: What is replayed.
        client: Who answers.
        output: A folder; made if it is not there.
        settings: Everything that decides the figures; a folder of a replay with others is refused.
        on_turn: Called with numbers of turns that are done, for a progress bar.
        fresh: Makes a client with an empty cache for each group. Default: all use `client`.

    Raises:
        ConfigError: The folder holds a replay with other settings.
        DataError: Its files are damaged; or as `Client.answer`.
        OSError: Something cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / TURNS_FILE
    _check_settings(output / SETTINGS_FILE, settings, has_turns=path.exists() and path.stat().st_size > 0)
    kept, left = _resumed(path, replay)
    write_atomically(path, "".join(to_line(asdict(turn)) for turn in kept))
    on_turn(len(kept))
    turns = list(kept)
    with open(path, "ab", buffering=0) as file:
        for policy, group in left:
            for turn in replay.played(client if fresh is None else fresh(), policy, group):
                append(file, to_line(asdict(turn)))
                turns.append(turn)
                on_turn(1)
    return turns


def _resumed(path: Path, replay: Replay) -> tuple[list[Turn], list[tuple[Policy, list[Trajectory]]]]:
    """The turns of groups that are complete, and the groups that are not."""
    found = read_turns(path) if path.exists() else []
    by_run: dict[tuple[str, str], list[Turn]] = {}
    for turn in found:
        by_run.setdefault((turn.policy, turn.trajectory), []).append(turn)
    kept: list[Turn] = []
    left: list[tuple[Policy, list[Trajectory]]] = []
    for policy, group in replay.groups:
        own = [by_run.get((policy.name, trajectory.name), []) for trajectory in group]
        if all(len(turns) == len(trajectory.turns) for turns, trajectory in zip(own, group, strict=True)):
            kept += [turn for turns in own for turn in turns]
        else:
            left.append((policy, group))
    return kept, left


def read_turns(path: Path) -> list[Turn]:
    """The turns of a file, without a line that a killed writer left incomplete. Raises `DataError`."""
    return read_lines(path, lambda fields: Turn(**fields), _DAMAGED)


def _check_settings(path: Path, settings: Mapping[str, Any], *, has_turns: bool) -> None:
    wanted = json.loads(json.dumps(settings))
    if has_turns:
        before = read_object(path, _DAMAGED)
        other = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
        if other:
            raise ConfigError(
                found=f"{path.parent} holds a replay with another {other[0]}: {before.get(other[0])!r}",
                required=f"the same settings ({wanted.get(other[0])!r} now)",
                remedy="choose another output folder, or remove this one",
            )
    write_atomically(path, json.dumps(wanted, indent=2) + "\n")
