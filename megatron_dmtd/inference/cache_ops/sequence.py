"""One request with cache operations while it is computed: where its tokens are cached, what must be computed, and what each step
reads, stores and copies. Numbers only.

Every cycle of the text (every token of an ordinary decoder) is either cached when the request begins, or computed by it, or never
read. A token is stored where it is born; when a stage begins whose positions differ, the survivors that move are copied, always
from where they were born if that is still known. Page sets that nothing will read are given back after each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dmtd.cycle import Method
from megatron_dmtd.inference.cache_ops.closure import missing_cycles
from megatron_dmtd.inference.cache_ops.pages import CountedPages, PageSet, PageSource
from megatron_dmtd.inference.cache_ops.program import NEVER, Indices, Timeline
from megatron_dmtd.inference.cache_ops.tree import CacheTree, Node, NodeKey, Place
from megatron_dmtd.inference.cache_ops.usage import Usage
from megatron_dmtd.inference.cache_ops.views import EditedChunk, Moves, Part, View
from megatron_dmtd.inference.kv.pages import PageTables

#: Number of no page set.
NOWHERE = -1
#: Segments that one step computes at most; each has a view.
MAX_SEGMENTS = 32


class Places:
    """Where tokens are cached: the number of a page set, and an offset."""

    __slots__ = ("number", "offset")

    def __init__(self, num_tokens: int) -> None:
        self.number: Indices = np.full(num_tokens, NOWHERE)
        self.offset: Indices = np.zeros(num_tokens, np.int64)

    def take(self, tokens: Indices, other: Places) -> None:
        """The places of some tokens from another object."""
        self.number[tokens], self.offset[tokens] = other.number[tokens], other.offset[tokens]


class EditedSequence:
    """The cache of one request. Call `begin`, then `chunk` and `finish` in turn, and `end`."""

    def __init__(
        self,
        timeline: Timeline,
        method: Method,
        tokens: list[int],
        *,
        pages: PageSource,
        tree: CacheTree | None,
        computes_all: bool = False,
    ) -> None:
        """`computes_all`: compute every token, since the logits of all are wanted."""
        self.timeline, self.method, self.tokens = timeline, method, tokens
        self.pages, self.tree, self.computes_all = pages, tree, computes_all
        self.usage: Usage | None = None
        """Of the first time that it began."""
        self._reset()

    def _reset(self) -> None:
        capacity = self.timeline.num_tokens
        self.pending: list[int] = []
        """Cycles of the prompt, or of the text before a preemption, that are still to be computed."""
        self._path: list[Node] = []
        self._has_found = False
        self._births = Places(capacity)
        self._others: dict[int, dict[int, Place]] = {}
        """Of cached tokens that are read: position -> place, of copies."""
        self._stages: dict[int, Places] = {}
        """Of each stage that has begun and is still read."""
        self._sets: list[PageSet] = []
        self._numbers: dict[PageSet, int] = {}
        """Of the page sets that the request owns."""
        self._tail: PageSet | None = None
        self._tail_offset = self.pages.page_size
        self._unrefreshed: int | None = None
        """Head of the computed cycle whose real K and V are still to be computed, or None."""
        self._released_for = 0
        self._view: tuple[int, View] | None = None
        """The segment of the last step, and its view."""
        self._step_moves: list[tuple[Indices, Indices, Places]] = []
        self._final: list[int] = []
        """Heads of the cycles that the step makes final."""
        self._places: dict[int, tuple[PageSet, int]] = {}

    # Beginning and end.

    def begin(self) -> None:
        """Find what is cached, and what must be computed."""
        num_tokens, length = len(self.tokens), self.method.cycle_length
        if self.tree is not None and not self.computes_all:
            self._path = self._matched((num_tokens - 1) // length)
            self.tree.lock(self._path)
        is_cached = np.zeros(self.timeline.num_tokens, bool)
        for node in self._path:
            for offset, _ in node.places:
                is_cached[node.depth * length + offset] = True
        self.pending = missing_cycles(self.timeline, is_cached, num_tokens, all_of_them=self.computes_all)
        is_computed = np.zeros(self.timeline.num_tokens, bool)
        for cycle in self.pending:
            is_computed[cycle * length : (cycle + 1) * length] = True
        is_resident = is_cached & ~is_computed
        self._has_found = bool(is_resident.any())
        is_read = is_resident & self._is_read()
        self._own_cached(is_read)
        if self.usage is None:
            is_moved = is_read & self._is_moved(is_read)
            resident, read, moved = (int(np.count_nonzero(one[:num_tokens])) for one in (is_resident, is_read, is_moved))
            self.usage = Usage(
                prompt_tokens=num_tokens,
                cached_tokens=read - moved,
                repos_tokens=moved,
                drop_skipped_tokens=resident - read,
                prefill_tokens=int(np.count_nonzero(is_computed[:num_tokens])),
            )

    def end(self) -> None:
        """Let go of everything; the tree keeps what it knows. May begin again."""
        if self.tree is not None:
            self.tree.unlock(self._path)
        for pages in self._numbers:
            self.pages.release(pages)
        self._reset()

    def _key(self, cycle: int) -> NodeKey:
        head = cycle * self.method.cycle_length
        return self.timeline.node_key(head), tuple(self.tokens[head : head + self.method.cycle_length])

    def _matched(self, num_cycles: int) -> list[Node]:
        assert self.tree is not None
        node, path = self.tree.root, []
        for cycle in range(num_cycles):
            found = self.tree.child(node, self._key(cycle))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def _is_read(self) -> np.ndarray:
        """Of each token whether a pending cycle after its own reads it: then the nearest one does."""
        length = self.method.cycle_length
        heads = np.array([*self.pending, NEVER // length + 1]) * length
        own = np.arange(self.timeline.num_tokens // length)
        nearest = heads[np.searchsorted(np.array(self.pending), own, side="right")]
        return self.timeline.expiry > np.repeat(nearest, length)

    def _planned_stages(self) -> dict[int, int]:
        """The stages that pending cycles belong to, with the first of these in each."""
        found: dict[int, int] = {}
        for cycle in self.pending:
            head = cycle * self.method.cycle_length
            found.setdefault(self.timeline.stage_of(head), head)
        return found

    def _own_cached(self, is_read: np.ndarray) -> None:
        """Own the cached tokens that will be read, where they were born and where copies of them are."""
        length, birth = self.method.cycle_length, self.timeline.birth
        for node in self._path:
            head = node.depth * length
            if not is_read[head : head + length].any():
                continue
            for (offset, position), place in node.places.items():
                token = head + offset
                if not is_read[token]:
                    continue
                if position == birth[token]:
                    self._births.number[token], self._births.offset[token] = self._own(place[0]), place[1]
                else:
                    self._own(place[0])
                    self._others.setdefault(token, {})[position] = place

    def _own(self, pages: PageSet, *, is_new: bool = False) -> int:
        number = self._numbers.get(pages)
        if number is None:
            if not is_new:
                self.pages.share(pages)
            number = self._numbers[pages] = len(self._sets)
            self._sets.append(pages)
        return number

    def _is_moved(self, is_read: np.ndarray) -> np.ndarray:
        """Of the cached tokens, those that some pending cycle reads at a position where they are not cached."""
        found, birth = np.zeros_like(is_read), self.timeline.birth
        for stage, first in self._planned_stages().items():
            end = self._stage_end(stage)
            position = self.timeline.positions(stage)[:end]
            tokens = np.flatnonzero(is_read[:end] & (position >= 0) & (self.timeline.expiry[:end] > first))
            elsewhere = tokens[(position[tokens] != birth[tokens]) | (self._births.number[tokens] == NOWHERE)]
            for token in elsewhere.tolist():
                if int(position[token]) not in self._others.get(token, ()):
                    found[token] = True
        return found

    def _stage_end(self, stage: int) -> int:
        stages = self.timeline.stages
        return stages[stage + 1].head if stage + 1 < len(stages) else self.timeline.num_tokens

    # What a step takes.

    @property
    def has_found(self) -> bool:
        """Whether something was cached when it began."""
        return self._has_found

    @property
    def num_pending(self) -> int:
        """Tokens that must be computed before a new one can be chosen; 1 while decoding."""
        length = self.method.cycle_length
        if not self.pending:
            return 1
        return (len(self.pending) - 1) * length + len(self.tokens) - self.pending[-1] * length

    @property
    def next_token(self) -> int:
        """The raw token that is computed next."""
        return self.pending[0] * self.method.cycle_length if self.pending else len(self.tokens) - 1

    def stops(self, budget: int) -> list[int]:
        """Where the next chunk may stop, in order: after each of the next cycles, about `budget` tokens of them at most."""
        length = self.method.cycle_length
        if not self.pending:
            return [len(self.tokens)]
        found, segments = list[int](), set[int]()
        for cycle in self.pending[: max(1, budget // length)]:
            segments.add(self.timeline.segment_of(cycle * length))
            if len(segments) > MAX_SEGMENTS:
                break
            found.append(min((cycle + 1) * length, len(self.tokens)))
        return found

    def num_tokens_until(self, stop: int) -> int:
        """Tokens that a chunk which stops there computes."""
        length = self.method.cycle_length
        if not self.pending:
            return 1
        return sum(min((cycle + 1) * length, len(self.tokens)) - cycle * length for cycle in self._cycles(stop))

    def _cycles(self, stop: int) -> list[int]:
        """Cycles that begin in a chunk which stops there."""
        length = self.method.cycle_length
        if self.pending:
            return [cycle for cycle in self.pending if cycle * length < stop]
        token = len(self.tokens) - 1
        return [token // length] if self.method.phase(token) == 0 else []

    def missing(self, stop: int) -> int:
        """New page sets for a chunk that stops there, or a few more."""
        length, size = self.method.cycle_length, self.pages.page_size
        used = offset = self._tail_offset
        begun = set(self._stages)
        for cycle in self._cycles(stop):
            head = cycle * length
            stage = self.timeline.stage_of(head)
            if stage not in begun:
                begun.add(stage)
                offset += len(self._to_move(stage, head))
            offset = -(-offset // length) * length + length
        return (offset - 1) // size - (used - 1) // size if offset > used else 0

    def chunk(self, stop: int) -> EditedChunk:
        """Plan a chunk that stops there. Takes page sets."""
        length, refreshes = self.method.cycle_length, len(self.method.streams) > 1
        cycles, moves = self._cycles(stop), list[Moves]()
        parts: dict[int, list[list[int]]] = {}  # by segment: refreshed, blocks, tokens
        limits: dict[int, int] = {}
        self._step_moves, self._final, self._places = [], [], dict(self._places)

        def part(head: int, limit: int) -> list[list[int]]:
            segment = self.timeline.segment_of(head)
            limits[segment] = limit
            return parts.setdefault(segment, [[], [], []])

        if cycles and self._unrefreshed is not None:
            head, self._unrefreshed = self._unrefreshed, None
            part(head, head + length)[0].append(head)
            self._final.append(head)
        for cycle in cycles:
            head = cycle * length
            moves += self._begin_stage(self.timeline.stage_of(head), head)
            self._store_cycle(head)
            own, known = part(head, head + length), min(head + length, len(self.tokens))
            own[2].extend(range(head, known))
            if self.method.is_vanilla:
                self._final.append(head)
                continue
            own[1].append(head)
            is_complete = bool(self.pending) and known == head + length
            if refreshes and is_complete:
                own[0].append(head)
                self._final.append(head)
            elif refreshes:
                self._unrefreshed = head
            elif is_complete:
                self._final.append(head)
        if not cycles:
            token = len(self.tokens) - 1
            part(self.method.cycle_start(token), token + 1)[2].append(token)
        if self._completes_shadow(cycles):
            self._final.append(self.method.cycle_start(len(self.tokens) - 1))
        made = [Part(self._view_of(segment, limits[segment]), *own) for segment, own in sorted(parts.items())]
        return EditedChunk(made, moves, self.timeline.birth, self._places)

    def _completes_shadow(self, cycles: Sequence[int]) -> bool:
        """Whether a decoding step takes the last token of a cycle with shadow history, which then is final."""
        if self.pending or self.method.is_vanilla or len(self.method.streams) > 1:
            return False
        return len(self.tokens) % self.method.cycle_length == 0

    def _store_cycle(self, head: int) -> None:
        length, size = self.method.cycle_length, self.pages.page_size
        self._tail_offset = -(-self._tail_offset // length) * length
        number, offset = self._new_entries(length)
        assert (number == number[0]).all() and size % length == 0, number
        tokens = np.arange(head, head + length)
        self._births.number[tokens], self._births.offset[tokens] = number, offset
        self._stages[self.timeline.stage_of(head)].take(tokens, self._births)
        self._places[head] = self._sets[number[0]], int(offset[0])

    def _new_entries(self, count: int) -> tuple[Indices, Indices]:
        """Numbers of page sets and offsets of new entries."""
        number, offset = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            if self._tail is None or self._tail_offset == self.pages.page_size:
                self._tail, self._tail_offset = self.pages.new(), 0
                self._own(self._tail, is_new=True)
            here = min(count - done, self.pages.page_size - self._tail_offset)
            number[done : done + here] = self._numbers[self._tail]
            offset[done : done + here] = np.arange(self._tail_offset, self._tail_offset + here)
            done, self._tail_offset = done + here, self._tail_offset + here
        return number, offset

    # Stages.

    def _to_move(self, stage: int, first: int) -> Indices:
        """Tokens that must be copied before `first`, the first query of a stage that is computed, can read them."""
        timeline, end = self.timeline, self._stage_end(stage)
        position, birth = timeline.positions(stage)[:end], timeline.birth[:end]
        is_computed = self._will_be_born()[:end]
        is_cached = self._births.number[:end] != NOWHERE
        for token in self._others:
            if token < end:
                is_cached[token] = True
        lacks = (position >= 0) & (timeline.expiry[:end] > first) & (is_cached | is_computed)
        lacks &= (position != birth) | ((self._births.number[:end] == NOWHERE) & ~is_computed)
        for token in [token for token in self._others if token < end and lacks[token]]:
            lacks[token] = int(position[token]) not in self._others[token]
        if earlier := [other for other in self._stages if other < stage]:
            before = max(earlier)
            same = timeline.positions(before)[:end] == position
            lacks &= ~(same & (self._stages[before].number[:end] != NOWHERE))
        return np.flatnonzero(lacks)

    def _will_be_born(self) -> np.ndarray:
        found, length = np.zeros(self.timeline.num_tokens, bool), self.method.cycle_length
        for cycle in self.pending:
            found[cycle * length : (cycle + 1) * length] = True
        return found

    def _begin_stage(self, stage: int, first: int) -> list[Moves]:
        """Give every token that the stage reads its place there. Returns the copies that this takes."""
        if stage in self._stages:
            return []
        tokens, end = self._to_move(stage, first), self._stage_end(stage)
        places, position = Places(self.timeline.num_tokens), self.timeline.positions(stage)
        if earlier := [other for other in self._stages if other < stage]:
            before = max(earlier)
            same = (self.timeline.positions(before)[:end] == position[:end]) & (self._stages[before].number[:end] != NOWHERE)
            places.take(np.flatnonzero(same), self._stages[before])
        is_at_birth = (position[:end] == self.timeline.birth[:end]) & (self._births.number[:end] != NOWHERE)
        places.take(np.flatnonzero(is_at_birth), self._births)
        for token, others in self._others.items():
            if token < end and (place := others.get(int(position[token]))):
                places.number[token], places.offset[token] = self._numbers[place[0]], place[1]
        self._stages[stage] = places
        if not len(tokens):
            return []
        source_number, source_offset, source_position = self._sources(tokens)
        places.number[tokens], places.offset[tokens] = number, offset = self._new_entries(len(tokens))
        self._step_moves.append((tokens, position[tokens], places))
        return [
            Moves(
                [self._sets[one] for one in source_number.tolist()],
                source_offset,
                source_position,
                [self._sets[one] for one in number.tolist()],
                offset,
                position[tokens],
            )
        ]

    def _sources(self, tokens: Indices) -> tuple[Indices, Indices, Indices]:
        """Where tokens are copied from: from where they were born, or else from the latest copy."""
        number, offset = self._births.number[tokens], self._births.offset[tokens]
        position = self.timeline.birth[tokens].copy()
        for index in np.flatnonzero(number == NOWHERE).tolist():
            token = int(tokens[index])
            position[index], place = max(self._others[token].items())
            number[index], offset[index] = self._numbers[place[0]], place[1]
        return number, offset, position

    def _view_of(self, segment: int, limit: int) -> View:
        """What the queries of a segment see, of the tokens before `limit`."""
        start, timeline = self.timeline.segment_start(segment), self.timeline
        stage = timeline.stage_of(start)
        places, position = self._stages[stage], timeline.positions(stage)
        if self._view is not None and self._view[0] == segment and not self.pending:
            view, first = self._view[1], self.method.cycle_start(limit - 1)
        else:
            view, first = View(self.pages.page_size), 0
        tokens = np.arange(first, limit if not first else first + self.method.cycle_length)
        is_seen = (places.number[tokens] != NOWHERE) & (timeline.expiry[tokens] > start) & (position[tokens] >= 0)
        tokens = tokens[is_seen]
        for number in np.unique(places.number[tokens]).tolist():
            own = tokens[places.number[tokens] == number]
            view.add(self._sets[number], places.offset[own], position[own])
        self._view = segment, view
        return view

    # After a step.

    def finish(self, *, is_shared: bool) -> None:
        """The chunk has been computed. `is_shared`: other requests may use what it has computed."""
        self.pending = [cycle for cycle in self.pending if cycle * self.method.cycle_length not in self._places]
        if self.tree is not None and is_shared:
            self._register(self.tree)
        latest = max(self._places, default=None)
        self._places = {head: place for head, place in self._places.items() if head == latest}
        self._step_moves, self._final = [], []
        following = len(self.tokens)
        if self.pending:
            following = self.pending[0] * self.method.cycle_length
        elif self._unrefreshed is not None:
            following = self._unrefreshed
        else:
            following = self.method.cycle_start(following) if not self.method.is_vanilla else following
        if self.timeline.segment_of(following) != self._released_for:
            self._released_for = self.timeline.segment_of(following)
            self._release(following)

    def _register(self, tree: CacheTree) -> None:
        """Make known what the step has made final, and its copies."""
        length, birth = self.method.cycle_length, self.timeline.birth
        for head in sorted(self._final):
            cycle = head // length
            while len(self._path) <= cycle:
                node = tree.grow(self._path[-1] if self._path else tree.root, self._key(len(self._path)))
                tree.lock([node])
                self._path.append(node)
            pages, first = self._sets[self._births.number[head]], int(self._births.offset[head])
            for offset in range(length):
                tree.insert(self._path[cycle], (offset, int(birth[head + offset])), (pages, first + offset))
        for tokens, positions, places in self._step_moves:
            for token, position in zip(tokens.tolist(), positions.tolist()):
                cycle, offset = divmod(token, length)
                if cycle < len(self._path):
                    place = self._sets[places.number[token]], int(places.offset[token])
                    tree.insert(self._path[cycle], (offset, position), place)

    def _release(self, following: int) -> None:
        """Give back the page sets that neither `following` nor a later query reads."""
        stage = self.timeline.stage_of(following)
        current = max((one for one in self._stages if one <= stage), default=None)
        self._stages = {one: places for one, places in self._stages.items() if one == current}
        alive = self.timeline.expiry > following
        needs_births = current != stage or stage + 1 < len(self.timeline.stages)
        kept = {self._numbers[self._tail]} if self._tail is not None else set()
        for places in [*self._stages.values(), *([self._births] if needs_births else [])]:
            kept |= set(np.unique(places.number[alive]).tolist())
        if needs_births or self.pending:
            kept |= {
                self._numbers[place[0]] for token, all_of in self._others.items() if alive[token] for place in all_of.values()
            }
        for pages, number in list(self._numbers.items()):
            if number not in kept:
                del self._numbers[pages]
                self.pages.release(pages)
        gone = ~np.isin(self._births.number, list(self._numbers.values()))
        self._births.number[gone] = NOWHERE
        for places in self._stages.values():
            places.number[~np.isin(places.number, list(self._numbers.values()))] = NOWHERE
        self._others = {
            token: others for token, others in self._others.items() if all(p[0] in self._numbers for p in others.values())
        }

    def owned(self) -> list[PageTables]:
        """What the request owns, for the store's check."""
        return [pages.tables for pages in self._numbers]


def most_page_sets(timeline: Timeline, method: Method, prompt_length: int, num_tokens: int, page_size: int) -> int:
    """Page sets that a request of `num_tokens`, output included, owns at most when it is computed cycle by cycle.

    Counted segment by segment: within one, page sets are taken and none are given back, so the most are the same.
    """
    pages, length = CountedPages(page_size), method.cycle_length
    sequence = EditedSequence(timeline, method, [0] * prompt_length, pages=pages, tree=None)
    sequence.begin()
    while sequence.pending:
        segment = timeline.segment_of(sequence.pending[0] * length)
        end = timeline.cuts[segment] if segment < len(timeline.cuts) else prompt_length
        sequence.chunk(min(end, prompt_length))
        sequence.finish(is_shared=False)
    while len(sequence.tokens) < num_tokens:
        sequence.tokens.append(0)
        sequence.chunk(len(sequence.tokens))
        sequence.finish(is_shared=False)
    return pages.most_used
