"""A request's list of cache operations: its validation, and what it means for every raw token. Numbers only.

A raw index counts the tokens of a request's text, whatever happens to its cache. An operation acts on the tokens before its
boundary, as seen from those after it; with cycles it takes effect at the first cycle head at or after the boundary. So a query at
raw index q sees token t if t is not after q and q lies before the token's *expiry*, at the position of the query's *stage*:
stages are separated by the repositions that change anything, segments by everything that changes anything.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_dmtd.errors import DataError, shown

#: Operations that one request may have.
MAX_OPERATIONS = 4096
#: Of a token that nothing drops.
NEVER = 2**62

Indices = npt.NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """What happens once the first `after` raw tokens have been computed; the drop comes first."""

    after: int
    drop: Ranges = ()
    reposition: bool = False


def parse_program(program: object, num_tokens: int) -> tuple[Operation, ...]:
    """The operations of a prompt of `num_tokens` tokens. Raises `DataError`, which names the index of the one that is wrong."""
    if not isinstance(program, Sequence) or isinstance(program, str | bytes):
        raise _refusal(f"cache={shown(program)}", "a list of operations")
    if len(program) > MAX_OPERATIONS:
        raise _refusal(f"cache[{MAX_OPERATIONS}]: {len(program)} operations", f"at most {MAX_OPERATIONS}")
    operations: list[Operation] = []
    for index, item in enumerate(program):
        one = _operation(f"cache[{index}]", item, num_tokens)
        if operations and one.after < operations[-1].after:
            raise _refusal(f"cache[{index}].after={one.after} after {operations[-1].after}", "boundaries that never fall")
        operations.append(one)
    return tuple(operations)


def _operation(name: str, item: object, num_tokens: int) -> Operation:
    if not isinstance(item, dict):
        raise _refusal(f"{name}: {shown(item)}", 'an object such as {"after": 9, "drop": [[2, 5]]}')
    unknown = [key for key in item if key not in ("after", "drop", "reposition")]
    if unknown:
        raise _refusal(f"{name}: unknown key {shown(unknown[0])}", "only after, drop and reposition")
    if "after" not in item:
        raise _refusal(f"{name}: no after", "the number of tokens after which the operation acts")
    after = _integer(f"{name}.after", item["after"])
    if not 0 <= after <= num_tokens:
        raise _refusal(f"{name}.after={shown(after)}", f"from 0 to the prompt's {num_tokens} tokens")
    if "drop" not in item and "reposition" not in item:
        raise _refusal(f"{name}: only after", "drop or reposition")
    if item.get("reposition", True) is not True:
        raise _refusal(f"{name}.reposition={shown(item['reposition'])}", "true, or no such key")
    return Operation(after, _ranges(f"{name}.drop", item.get("drop", ()), after), "reposition" in item)


def _ranges(name: str, ranges: object, after: int) -> Ranges:
    if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
        raise _refusal(f"{name}={shown(ranges)}", "a list of pairs [begin, end]")
    found = []
    for index, pair in enumerate(ranges):
        own = f"{name}[{index}]"
        if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) != 2:
            raise _refusal(f"{own}={shown(pair)}", "a pair [begin, end] of raw token indices")
        begin, end = (_integer(own, value) for value in pair)
        if not 0 <= begin <= end:
            raise _refusal(f"{own}={shown([begin, end])}", "0 <= begin <= end")
        if end > after:
            raise _refusal(
                f"{own}={shown([begin, end])} with after={after}", "only tokens before the boundary: none of the future"
            )
        found.append((begin, end))
    return tuple(found)


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _refusal(f"{name}: {shown(value)}", "an integer") from None


def _refusal(found: str, required: str) -> DataError:
    return DataError(found=found, required=required, remedy="correct the request's cache operations")


def _active_within(ranges: Ranges, active: npt.NDArray[np.bool_]) -> Indices:
    """Tokens of these ranges that are active, rising, each once. Each token is looked at once, however many ranges name it."""
    found, end = [np.zeros(0, np.int64)], 0
    for begin, stop in sorted(ranges):
        begin, end = max(begin, end), max(stop, end)
        if begin < end:
            found.append(begin + np.flatnonzero(active[begin:end]))
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class Stage:
    """The time between two repositions that change something."""

    head: int
    """The first raw query that sees its positions."""
    act: int
    """Number of the reposition among all acts of the program; -1 for the first stage."""
    length: int
    """Survivors, which have positions from 0."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """What the next token would see."""

    active: list[int]
    """Raw indices of the tokens that it sees."""
    positions: list[int]
    """Of each of them."""
    next_position: int
    """Its own."""


class Timeline:
    """A program over the raw tokens `[0, num_tokens)`, completed to whole cycles: a function of raw indices alone."""

    def __init__(self, operations: Sequence[Operation], cycle_length: int, num_tokens: int, *, prefix_key: int = 0) -> None:
        """Raises `DataError` if a reposition finds nothing active.

        `prefix_key`: requests with another one compute other K and V of the same tokens.
        """
        self.cycle_length, self.prefix_key = cycle_length, prefix_key
        self.num_tokens = -(-num_tokens // cycle_length) * cycle_length
        self.birth: Indices = np.zeros(self.num_tokens, np.int64)
        """Position of each token when it was computed."""
        self.expiry: Indices = np.full(self.num_tokens, NEVER)
        """The first raw query that may not see the token."""
        self._dropped_by: Indices = np.full(self.num_tokens, NEVER)
        """The act that drops the token."""
        self.stages = [Stage(0, -1, 0)]
        self.records: dict[int, tuple[Ranges | bool, ...]] = {}
        """What takes effect at a raw index, in a normal form: ranges that are dropped, True for a reposition."""
        self._positions: dict[int, Indices] = {}
        self._sweep(operations)
        self.cuts = sorted(self.records)
        """Where segments begin, but the first."""

    def _sweep(self, operations: Sequence[Operation]) -> None:
        position, active = np.zeros(self.num_tokens, np.int64), np.zeros(self.num_tokens, bool)
        known = following = 0
        for number, one in enumerate(operations):
            head = -(-one.after // self.cycle_length) * self.cycle_length
            if head > self.num_tokens:
                break  # the text ends before the head is reached
            born = head - known
            self.birth[known:head] = position[known:head] = np.arange(following, following + born)
            active[known:head] = True
            known, following = head, following + born
            fresh = _active_within(one.drop, active)
            if len(fresh):
                active[fresh], self.expiry[fresh], self._dropped_by[fresh] = False, head, number
                self._record_drop(head, fresh)
            if one.reposition:
                survivors = np.flatnonzero(active[:head])
                if not len(survivors):
                    raise _refusal(f"cache[{number}]: a reposition with nothing active", "a token that has not been dropped")
                ranks = np.arange(len(survivors))
                if following != len(survivors) or (position[survivors] != ranks).any():
                    position[survivors], following = ranks, len(survivors)
                    self.stages.append(Stage(head, number, following))
                    self.records[head] = (*self.records.get(head, ()), True)
        self.birth[known:] = np.arange(following, following + self.num_tokens - known)

    def _record_drop(self, head: int, fresh: Indices) -> None:
        before = self.records.get(head, ())
        if before and before[-1] is not True:  # drops at one boundary are one
            fresh = np.sort(np.concatenate([fresh, *(np.arange(*pair) for pair in before[-1])]))  # type: ignore[union-attr]
            before = before[:-1]
        breaks = np.flatnonzero(np.diff(fresh) > 1)
        begins, ends = fresh[np.r_[0, breaks + 1]], fresh[np.r_[breaks, len(fresh) - 1]] + 1
        self.records[head] = (*before, tuple(zip(begins.tolist(), ends.tolist())))

    def node_key(self, head: int) -> object:
        """What distinguishes a cached cycle from others of the same tokens after the same ones."""
        record = self.records.get(head)
        return record if head or not self.prefix_key else (self.prefix_key, record)

    @cached_property
    def _stage_heads(self) -> list[int]:
        return [stage.head for stage in self.stages]

    def stage_of(self, query: int) -> int:
        """The stage of a raw query."""
        return bisect_right(self._stage_heads, query) - 1

    def segment_of(self, query: int) -> int:
        """The segment of a raw query."""
        return bisect_right(self.cuts, query)

    def segment_start(self, segment: int) -> int:
        """The first raw query of a segment."""
        return self.cuts[segment - 1] if segment else 0

    def positions(self, stage: int) -> Indices:
        """Position of each token in a stage; -1 of one that was dropped before. Tokens of later stages have no meaning in it."""
        found = self._positions.get(stage)
        if found is None:
            one, found = self.stages[stage], self.birth.copy()
            survives = self._dropped_by[: one.head] > one.act if one.act >= 0 else np.ones(one.head, bool)
            # A drop in the same operation as the reposition, comes first and has the same number.
            found[: one.head] = np.where(survives, np.cumsum(survives) - 1, -1)
            if len(self._positions) > 8:
                self._positions.pop(next(iter(self._positions)))
            self._positions[stage] = found
        return found

    def state(self, num_tokens: int) -> CacheState:
        """After `num_tokens` tokens, and the operations up to there."""
        active = np.flatnonzero(self.expiry[:num_tokens] > num_tokens)
        positions = self.positions(self.stage_of(num_tokens))[active]
        return CacheState(active.tolist(), positions.tolist(), int(self.birth[num_tokens]))

    def check_positions(self, num_tokens: int, limit: int) -> None:
        """Accept the positions of the first `num_tokens` tokens, or raise `DataError`."""
        beyond = np.flatnonzero(self.birth[:num_tokens] >= limit)
        if len(beyond):
            token = int(beyond[0])
            raise DataError(
                found=f"position {int(self.birth[token])} of token {token}, output included",
                required=f"positions below {limit}",
                remedy="drop and reposition earlier, shorten the prompt or its output, or raise max_length of the engine",
            )
