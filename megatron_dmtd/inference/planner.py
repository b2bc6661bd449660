"""What one decoding step computes: which rows run through which layers, what each may read, what is stored, what is kept.

Numbers only: no tensors, no pages, no weights. A step takes each request from `start` to `stop` tokens, all of them known: one
token is a decoding step, more are a piece of a prompt. Both follow from the same rules, so a prompt may be cut anywhere.

In each visit every row first stores its K and V, if they are to be kept; then it attends to the first `entry_end` entries of its
request and to rows `[local_begin, local_end)` of the same pass, whose K and V are not stored. The variants differ only in these
numbers, so one pass over the parallel layers' weights serves both refresh and shadow rows (docs/method.md, section 7.3). A
sliding window only moves the beginnings of both ranges.

A row's position, by which its query and key are rotated, is one number; the entry where its K and V are stored is another. For a
plain request both are the token's index.

Source: docs/method.md, sections 6 to 10; for pieces of prompts, the training rules of docs/method.md, sections 2 to 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_dmtd.cycle import Method
from megatron_dmtd.inference.cache_ops.views import EditedChunk, Moves, View

#: In `Rows.view`: the pages of the chunk's slot.
OWN_PAGES = -1


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's part of a step: its tokens `[start, stop)`."""

    slot: int
    """Where the engine keeps the request's shadow hidden states."""
    tokens: Sequence[int]
    start: int
    """Tokens already taken."""
    stop: int
    edited: EditedChunk | None = None
    """How it is computed, for a request with cache operations."""
    num_loops: int = 1
    """How often the decoder's looped layers run for these tokens; without such layers it says nothing."""

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= len(self.tokens), (self.start, self.stop, len(self.tokens))


class Reads(NamedTuple):
    """What the rows of a pass read in one group, as columns; half-open ranges, which may be empty."""

    entry_begin: list[int]
    entry_end: list[int]
    """Entries of the row's request, those written in this pass included."""
    local_begin: list[int]
    local_end: list[int]
    """Rows of this pass, whose K and V need not be stored."""


@dataclass(slots=True)
class Rows:
    """Rows of one pass, as columns. Rows of one chunk are neighbours."""

    chunk: list[int] = field(default_factory=list)
    """Index of the row's chunk in the step."""
    position: list[int] = field(default_factory=list)
    """Position by which queries and keys are rotated."""
    phase: list[int] = field(default_factory=list)
    """Phase of the row's token in its cycle."""
    token_id: list[int] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)
    """The entry of the row's request where K and V are stored, before any attention; -1: they are not stored."""
    entry_end: list[int] = field(default_factory=list)
    """The row sees entries `[0, entry_end)`."""
    local_begin: list[int] = field(default_factory=list)
    local_end: list[int] = field(default_factory=list)
    """The row also sees rows `[local_begin, local_end)` of this pass, which are neighbours in position, too."""
    view: list[int] = field(default_factory=list)
    """Index of the view (`StepPlan.views`) that the row stores to and reads from; there, what a row sees is given as positions,
    whatever their entries. `OWN_PAGES` for a plain request."""

    def __len__(self) -> int:
        return len(self.position)

    def add(
        self,
        chunk: int,
        position: int,
        token_id: int,
        *,
        phase: int,
        is_stored: bool,
        entry_end: int,
        local: tuple[int, int] = (0, 0),
    ) -> None:
        """Append one row of a plain request, whose entries are its positions."""
        self.chunk.append(chunk)
        self.position.append(position)
        self.phase.append(phase)
        self.token_id.append(token_id)
        self.entry.append(position if is_stored else -1)
        self.entry_end.append(entry_end)
        self.local_begin.append(local[0])
        self.local_end.append(local[1])
        self.view.append(OWN_PAGES)

    def select(self, kept: Sequence[int]) -> Rows:
        """Some of the rows, ascending: all or none of each chunk, so that what a row reads is still there."""
        found, shift = Rows(), dict[int, int]()
        for index, row in enumerate(kept):
            shift.setdefault(self.chunk[row], index - row)
        for name in ("chunk", "position", "phase", "token_id", "entry", "entry_end", "view"):
            setattr(found, name, [getattr(self, name)[row] for row in kept])
        for name in ("local_begin", "local_end"):
            column = getattr(self, name)
            setattr(found, name, [column[row] + shift[self.chunk[row]] if self.local_end[row] else 0 for row in kept])
        return found

    def reads(self, window: int | None) -> Reads:
        """What visits with this window read: of what a row sees, only positions above its own minus `window`."""
        if window is None:
            return Reads([0] * len(self), self.entry_end, self.local_begin, self.local_end)
        firsts = [max(0, position - window + 1) for position in self.position]
        entry_begin = [min(first, end) for first, end in zip(firsts, self.entry_end)]
        local_begin = [
            min(begin + max(0, first - self.position[begin]), end)
            for first, begin, end in zip(firsts, self.local_begin, self.local_end)
        ]
        return Reads(entry_begin, self.entry_end, local_begin, self.local_end)


@dataclass(frozen=True, slots=True)
class Kept:
    """The shadow hidden states that outlive the step: one whole block (docs/method.md, section 6.2)."""

    slot: int
    first_output: int
    """Index of the block's head among the outputs of the parallel pass."""


@dataclass(slots=True)
class StepPlan:
    """One step of all its chunks."""

    chunks: Sequence[Chunk]
    parallel: Rows = field(default_factory=Rows)
    outputs: list[int] = field(default_factory=list)
    """Rows of `parallel` whose hidden states leave the last parallel layer: the shadow rows. Real rows end at its K and V."""
    kept: list[Kept] = field(default_factory=list)
    sequential: Rows = field(default_factory=Rows)
    from_output: list[int] = field(default_factory=list)
    """For each sequential row the output that is added to its embedding, or -1: the kept one at its phase (after `kept`)."""
    last_rows: list[int] = field(default_factory=list)
    """For each chunk its last sequential row."""
    views: list[View] = field(default_factory=list)
    """Of requests with cache operations."""
    moves: list[Moves] = field(default_factory=list)
    """Copies that such requests need, in all groups."""


def plan_step(method: Method, chunks: Sequence[Chunk]) -> StepPlan:
    """Plan one step. The store holds what a request of `start` tokens has (`KVGroup.num_entries`)."""
    plan = StepPlan(chunks)
    for index, chunk in enumerate(chunks):
        if chunk.edited is not None:
            add_edited(plan, method, index, chunk, chunk.edited)
            continue
        assert chunk.stop <= method.furthest_stop(chunk.start, chunk.stop), (chunk.start, chunk.stop)
        first_block = method.complete_length(chunk.start)
        first_output = len(plan.outputs)
        if method.needs_parallel(chunk.start, chunk.stop):
            _add_parallel(plan, method, index, chunk, first_block)
        _add_sequential(plan, method, index, chunk, first_block, first_output)
    return plan


def _add_parallel(plan: StepPlan, method: Method, index: int, chunk: Chunk, first_block: int) -> None:
    """Real rows of the cycles to be refreshed, then the shadow blocks of the chunk's cycle heads."""
    rows, tokens = plan.parallel, chunk.tokens
    last_block = method.cycle_start(chunk.stop - 1)
    for position in method.refreshed(chunk.start, chunk.stop):
        rows.add(index, position, tokens[position], phase=method.phase(position), is_stored=True, entry_end=position + 1)
    is_stored = method.streams[0] == "shadow"
    for block in range(first_block, last_block + 1, method.cycle_length):
        begin = len(rows)
        for offset in range(method.cycle_length):
            position = block + offset
            token_id = tokens[position] if offset == 0 else method.mask_token_id
            seen = method.cycle_length if method.is_bidirectional else offset + 1
            plan.outputs.append(len(rows))
            # What the row sees of its block is among the entries if they are stored, else among the rows of this pass.
            entry_end, local = (block + seen, (0, 0)) if is_stored else (block, (begin, begin + seen))
            rows.add(index, position, token_id, phase=offset, is_stored=is_stored, entry_end=entry_end, local=local)
    plan.kept.append(Kept(chunk.slot, len(plan.outputs) - method.cycle_length))


def _add_sequential(plan: StepPlan, method: Method, index: int, chunk: Chunk, first_block: int, first_output: int) -> None:
    """One real row per token, each after the one before it (docs/method.md, section 6.1)."""
    last_block = method.cycle_start(chunk.stop - 1)
    for position in range(chunk.start, chunk.stop):
        phase = method.phase(position)
        plan.sequential.add(index, position, chunk.tokens[position], phase=phase, is_stored=True, entry_end=position + 1)
        is_of_earlier_block = first_block <= position < last_block and first_output < len(plan.outputs)
        plan.from_output.append(first_output + position - first_block if is_of_earlier_block else -1)
    plan.last_rows.append(len(plan.sequential) - 1)


def add_edited(plan: StepPlan, method: Method, index: int, chunk: Chunk, edited: EditedChunk) -> None:
    """The rows of a request with cache operations. They see positions of a view, the same as those of a plain request; only where
    a cycle is stored is another matter.
    """
    tokens, birth = chunk.tokens, edited.birth
    outputs: dict[int, int] = {}  # by the head of the block
    plan.moves += edited.moves
    for part in edited.parts:
        number = len(plan.views)
        plan.views.append(part.view)

        def add(
            rows: Rows, head: int, offset: int, token_id: int, *, is_stored: bool, end: int, part=part, number=number
        ) -> None:
            pages, first = edited.places[head]
            rows.add(index, int(birth[head]) + offset, token_id, phase=offset, is_stored=False, entry_end=end)
            rows.view[-1] = number
            if is_stored:
                rows.entry[-1] = part.view.entry(pages, first + offset)

        rows = plan.parallel
        for head in part.refreshed:
            for offset in range(method.cycle_length):
                end = int(birth[head]) + offset + 1
                add(rows, head, offset, tokens[head + offset], is_stored=True, end=end)
        for head in part.blocks:
            begin, first = len(rows), int(birth[head])
            outputs[head] = len(plan.outputs)
            for offset in range(method.cycle_length):
                seen = method.cycle_length if method.is_bidirectional else offset + 1
                plan.outputs.append(len(rows))
                token_id = tokens[head] if offset == 0 else method.mask_token_id
                end = first if len(method.streams) > 1 else first + seen
                add(rows, head, offset, token_id, is_stored=len(method.streams) == 1, end=end)
                if len(method.streams) > 1:
                    rows.local_begin[-1], rows.local_end[-1] = begin, begin + seen
        for token in part.tokens:
            head = method.cycle_start(token)
            offset = token - head
            add(plan.sequential, head, offset, tokens[token], is_stored=True, end=int(birth[head]) + offset + 1)
            plan.from_output.append(outputs[head] + offset if head in outputs else -1)
    if outputs:
        plan.kept.append(Kept(chunk.slot, outputs[max(outputs)]))
    plan.last_rows.append(len(plan.sequential) - 1)
