"""Chooses what is computed next: admission, chunks of prompts, alignment of cycle heads, preemption. Numbers only.

If requests at different phases were decoded together, the parallel layers' weights would be read in almost every step. So a clock
counts phases: a step decodes the requests whose next token is at the clock's phase, and then the clock advances. A request out
of phase waits until the clock reaches its phase, at most `cycle_length - 1` steps, once. Chunks of prompts are computed together
with the heads, for the same reason, unless nothing is being decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_dmtd.inference.cache_ops.sequence import EditedSequence
from megatron_dmtd.inference.cache_ops.tree import CacheTree
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.prefix import Known, PrefixIndex
from megatron_dmtd.inference.kv.store import KVStore, PageCounts
from megatron_dmtd.inference.loops import Pieces
from megatron_dmtd.inference.planner import Chunk


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One sample of one request, as the scheduler sees it."""

    tokens: list[int]
    """Prompt, then output."""
    tables: PageTables = field(default_factory=PageTables)
    num_taken: int = 0
    """Tokens that have gone through the sequential layers."""
    slot: int = -1
    """Place in the batch; -1 while waiting."""
    num_preemptions: int = 0
    reuses_prefix: bool = True
    """Whether its beginning may come from the prefix index, uncomputed."""
    known: Known = field(default_factory=Known)
    """How much of it the prefix index knows."""
    num_reused: int = 0
    """Tokens that the prefix index had when the sequence was first admitted."""
    has_older_entries: bool = False
    """Whether weights that have been replaced since computed some of its K and V: then no other sequence may use them."""
    edited: EditedSequence | None = None
    """The cache of a request with cache operations, in place of `tables` and `known`."""
    pieces: Pieces = field(default_factory=lambda: Pieces(prompt_length=0))
    """How it may be cut, and how often looped layers run for it."""

    @property
    def remaining(self) -> int:
        """Tokens known and not taken; 1 means that the next step decodes."""
        return len(self.tokens) - self.num_taken if self.edited is None else self.edited.num_pending


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's part of a step."""

    sequence: Sequence
    chunk: Chunk
    num_tokens: int
    """Tokens that it computes."""

    @property
    def is_complete(self) -> bool:
        """Whether the step takes the last known token, so that a new one can be chosen."""
        return self.chunk.stop == len(self.chunk.tokens)


class Scheduler:
    """Waiting and running sequences, oldest first."""

    def __init__(
        self,
        store: KVStore,
        *,
        num_slots: int,
        chunk_tokens: int,
        align_heads: bool,
        prefix_index: PrefixIndex | None,
        tree: CacheTree | None = None,
    ) -> None:
        assert num_slots >= 1 and chunk_tokens >= 1, (num_slots, chunk_tokens)
        self.method, self.store, self.prefix_index, self.tree = store.method, store, prefix_index, tree
        self.chunk_tokens, self.align_heads = chunk_tokens, align_heads
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._clock = 0

    @property
    def is_idle(self) -> bool:
        """Nothing waits or runs."""
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The caller has checked that it fits when it is alone."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its pages."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._take_down(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step. Empty only if nothing can run, that is, if idle."""
        self._admit()
        step: list[Scheduled] = []
        # A step can be empty if its only candidates had to give up their pages; the others then run in the next attempt.
        for _ in range(len(self.running) + self.method.cycle_length):
            self._schedule_running(step)
            if step:
                break
        assert step or self.is_idle, "nothing could be scheduled although something waits"
        return step

    def _schedule_running(self, step: list[Scheduled]) -> None:
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        for sequence in self._aligned(decoding):
            self._schedule_one(sequence, len(sequence.tokens), step)
        if self._prompts_may_run(bool(decoding)):
            self._schedule_prompts(step)

    def finish_step(self, step: list[Scheduled]) -> None:
        """Note what the step has taken. Call it before new tokens are appended."""
        for scheduled in step:
            sequence = scheduled.sequence
            sequence.num_taken = scheduled.chunk.stop
            if sequence.edited is not None:
                sequence.edited.finish(is_shared=not sequence.has_older_entries)
                if sequence.edited.pending:
                    sequence.num_taken = sequence.edited.next_token
                continue
            if self.prefix_index is not None and not sequence.has_older_entries:
                start, taken = map(sequence.pieces.num_shareable, (scheduled.chunk.start, sequence.num_taken))
                if self.prefix_index.num_final_pages(taken) > self.prefix_index.num_final_pages(start):
                    known, key = sequence.known, sequence.pieces.prefix_key
                    sequence.known = self.prefix_index.add(sequence.tokens, sequence.tables, taken, known, key=key)

    def change_weights(self, *, recompute: bool) -> None:
        """The model's weights have changed. Cached prefixes are forgotten; running sequences compute all their tokens again
        (`recompute`), or continue with the K and V that they have.
        """
        if self.prefix_index is not None:
            self.prefix_index.clear()
        if self.tree is not None:
            self.tree.detach()
        for sequence in reversed(list(self.running)):
            if recompute:
                self._preempt(sequence)
            else:
                sequence.has_older_entries = True

    def owned(self) -> Iterator[PageTables]:
        """Everything that owns pages, for the store's check."""
        yield from (sequence.tables for sequence in (*self.waiting, *self.running))
        if self.prefix_index is not None:
            yield from self.prefix_index.owned()
        if self.tree is not None:
            yield from self.tree.owned()
        for sequence in (*self.waiting, *self.running):
            if sequence.edited is not None:
                yield from sequence.edited.owned()

    # Admission.

    def _admit(self) -> None:
        """Admit sequences, oldest first, while there are slots, and pages for all tokens that they and the running ones know."""
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            if sequence.edited is not None:
                sequence.edited.begin()
                sequence.num_taken = sequence.edited.next_token
            elif self.prefix_index is not None and sequence.reuses_prefix:
                sequence.tables, sequence.known = self._attached(self.prefix_index, sequence)
                sequence.num_taken = sequence.known.num_pages * self.prefix_index.page_size
            if self.running and not self._make_room(sequence, len(sequence.tokens), self._promised()):
                self._let_go(sequence)
                sequence.num_taken, sequence.known = 0, Known()
                return
            sequence.num_reused = sequence.num_taken if sequence.num_preemptions == 0 else sequence.num_reused
            if self.prefix_index is not None and sequence.edited is None:
                self.prefix_index.num_reused_tokens += sequence.num_taken
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)

    @staticmethod
    def _attached(index: PrefixIndex, sequence: Sequence) -> tuple[PageTables, Known]:
        """What the index has of a sequence: of one that is cut exactly, whole pieces of the prompt."""
        pieces = sequence.pieces
        if pieces.length is None:
            return index.attach(sequence.tokens, key=pieces.prefix_key)
        prompt = sequence.tokens[: pieces.prompt_length]
        return index.attach(prompt, key=pieces.prefix_key, whole=pieces.length)

    def _promised(self) -> PageCounts:
        """Pages that running sequences still lack for the tokens that they know."""
        lacks = [self._missing(sequence, len(sequence.tokens)) for sequence in self.running]
        return {name: sum(counts[name] for counts in lacks) for name in self.store.groups}

    # Alignment.

    def _aligned(self, decoding: list[Sequence]) -> list[Sequence]:
        """The decoding sequences at the clock's phase; all of them if heads are not to be aligned."""
        if not self.align_heads or not decoding:
            return decoding
        phases = {self.method.phase(sequence.num_taken) for sequence in decoding}
        if self._clock not in phases:
            # None is at the clock's phase: start with the one farthest from its next head, so that the others can join.
            self._clock = min((phase for phase in phases if phase > 0), default=0)
        chosen = [sequence for sequence in decoding if self.method.phase(sequence.num_taken) == self._clock]
        self._clock = self.method.phase(self._clock + 1)
        return chosen

    def _prompts_may_run(self, is_decoding: bool) -> bool:
        """With heads (the clock has moved on to phase 1, or is still 0 for cycles of one token), or when nobody decodes."""
        return not self.align_heads or not is_decoding or self._clock == self.method.phase(1)

    def _schedule_prompts(self, step: list[Scheduled]) -> None:
        budget = self.chunk_tokens
        for sequence in list(self.running):
            if budget <= 0:
                return
            if sequence.slot < 0 or sequence.remaining <= 1:  # preempted meanwhile, or decoding
                continue
            stop = self._chunk_stop(sequence, budget)
            if self._schedule_one(sequence, stop, step):
                budget -= step[-1].num_tokens

    def _chunk_stop(self, sequence: Sequence, budget: int) -> int:
        """The end of the next piece: whole cycles if possible, so that the piece after it is not cut short."""
        if sequence.pieces.length is not None:
            return sequence.pieces.stop(sequence.num_taken, len(sequence.tokens))
        if sequence.edited is not None:
            return self._edited_stop(sequence.edited, budget)
        limit = min(len(sequence.tokens), sequence.num_taken + budget)
        if limit < len(sequence.tokens) and self.method.cycle_start(limit) > sequence.num_taken:
            limit = self.method.cycle_start(limit)
        return self.method.furthest_stop(sequence.num_taken, limit)

    def _edited_stop(self, edited: EditedSequence, budget: int) -> int:
        """The end of the next piece: as many cycles as there is room for, at least one."""
        stops = edited.stops(budget)
        while len(stops) > 1 and not self._has_room(self._in_all(edited.missing(stops[-1]))):
            stops = stops[: len(stops) // 2]
        return stops[-1]

    # Pages.

    def _schedule_one(self, sequence: Sequence, stop: int, step: list[Scheduled]) -> bool:
        """Give the sequence its pages and a part of the step, preempting younger ones if necessary. False if it must wait."""
        if sequence.slot < 0:
            return False
        while not self._make_room(sequence, stop):
            scheduled = {id(other.sequence) for other in step}
            victim = next((other for other in reversed(self.running) if id(other) not in scheduled), None)
            if step and victim in (None, sequence):
                return False  # all younger ones are gone or compute in this step: wait
            if len(self.running) == 1 and sequence.edited is not None and sequence.edited.has_found:
                self._begin_afresh(sequence.edited, sequence)
                return False
            assert victim is not None and len(self.running) > 1, "a sequence that fits alone found no room"
            self._preempt(victim)
            if victim is sequence:
                return False
        edited = None
        if sequence.edited is None:
            self.store.grow(sequence.tables, stop)
        else:
            num_tokens, edited = sequence.edited.num_tokens_until(stop), sequence.edited.chunk(stop)
        start = sequence.num_taken
        chunk = Chunk(sequence.slot, sequence.tokens, start, stop, edited, sequence.pieces.num_loops(start))
        step.append(Scheduled(sequence, chunk, num_tokens if edited else stop - sequence.num_taken))
        return True

    def _make_room(self, sequence: Sequence, stop: int, promised: PageCounts | None = None) -> bool:
        """Whether pages for `stop` tokens are free in addition to those promised, if necessary after evicting prefixes."""
        needed = self._missing(sequence, stop)
        if promised is not None:
            needed = {name: count + promised[name] for name, count in needed.items()}
        return self._has_room(needed)

    def _missing(self, sequence: Sequence, stop: int) -> PageCounts:
        """Pages that a sequence lacks for `stop` tokens."""
        if sequence.edited is None:
            return self.store.missing(sequence.tables, stop)
        return self._in_all(sequence.edited.missing(stop))

    def _in_all(self, count: int) -> PageCounts:
        """So many pages in every group."""
        return dict.fromkeys(self.store.groups, count)

    def _has_room(self, needed: PageCounts) -> bool:
        """Whether so many pages are free, if necessary after evicting prefixes."""
        while not self.store.has_free(needed):
            if self.prefix_index is not None and self.prefix_index.evict_one():
                continue
            return self.tree is not None and self.tree.evict(max(needed.values()))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free all its pages; it computes its tokens again when it is readmitted, before younger ones."""
        self._take_down(sequence)
        sequence.num_taken, sequence.known, sequence.has_older_entries = 0, Known(), False
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _begin_afresh(self, edited: EditedSequence, sequence: Sequence) -> None:
        """What was cached lies in so many pages that there is no room for the rest: compute everything."""
        assert self.tree is not None
        edited.end()
        self.tree.clear()
        edited.begin()
        sequence.num_taken = edited.next_token

    def _let_go(self, sequence: Sequence) -> None:
        """Return its pages."""
        self.store.release(sequence.tables)
        if sequence.edited is not None:
            sequence.edited.end()

    def _take_down(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.tables = PageTables()  # a new object: the runner tells by it that the slot's pages are others now
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
