"""What one decoding step computes: which rows run through which layers, what each may read, what is stored, what is kept.

Numbers only: no tensors, no pools, no weights. A step takes each request from `start` to `stop` tokens, all of them known: one
token is a decoding step, more are a piece of a prompt. Both follow from the same rules, so a prompt may be cut anywhere.

Every row first stores its K and V if it is written, layer by layer; then it attends to the first `history_length` entries of its
request's pool and to rows `[local_begin, local_end)` of the same pass, whose K and V are not stored. That is all that the
variants differ in, and it makes one pass over the parallel layers' weights serve refresh and shadow alike (docs/method.md,
section 7.3).

Source: docs/method.md, sections 6 to 10; for pieces of prompts, the training rules of docs/method.md, sections 2 to 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dmtd.cycle import Method, is_cycle_head


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's part of a step: its tokens `[start, stop)`, given all that it knows."""

    slot: int
    """Where the engine keeps the request's shadow hidden states."""
    tokens: Sequence[int]
    start: int
    """Tokens already taken: the entries in the sequential pool."""
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= len(self.tokens), (self.start, self.stop, len(self.tokens))


@dataclass(slots=True)
class Rows:
    """Rows of one pass, as columns. Rows of one chunk are neighbours."""

    chunk: list[int] = field(default_factory=list)
    """Index of the row's chunk in the step."""
    position: list[int] = field(default_factory=list)
    token_id: list[int] = field(default_factory=list)
    is_written: list[bool] = field(default_factory=list)
    """Whether K and V go to the pool, at entry `position`; decided before anything attends."""
    history_length: list[int] = field(default_factory=list)
    """The row sees entries `[0, history_length)` of the pool, those written in this pass included."""
    local_begin: list[int] = field(default_factory=list)
    local_end: list[int] = field(default_factory=list)
    """The row also sees rows `[local_begin, local_end)` of this pass."""

    def __len__(self) -> int:
        return len(self.position)

    def add(
        self, chunk: int, position: int, token_id: int, *, is_written: bool, history_length: int, local: tuple[int, int] = (0, 0)
    ) -> None:
        """Append one row."""
        self.chunk.append(chunk)
        self.position.append(position)
        self.token_id.append(token_id)
        self.is_written.append(is_written)
        self.history_length.append(history_length)
        self.local_begin.append(local[0])
        self.local_end.append(local[1])


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
    """Rows of `parallel` whose hidden states leave the last parallel layer: the shadow rows. Refresh rows end at its K and V."""
    kept: list[Kept] = field(default_factory=list)
    sequential: Rows = field(default_factory=Rows)
    from_output: list[int] = field(default_factory=list)
    """For each sequential row the output that is added to its embedding, or -1: the kept one at its phase (after `kept`)."""
    last_rows: list[int] = field(default_factory=list)
    """For each chunk its last sequential row."""


def plan_step(method: Method, chunks: Sequence[Chunk]) -> StepPlan:
    """Plan one step. Every chunk's pools hold what `method.parallel_entries(start)` and `start` say."""
    plan = StepPlan(chunks)
    for index, chunk in enumerate(chunks):
        assert chunk.stop <= method.furthest_stop(chunk.start, chunk.stop), (chunk.start, chunk.stop)
        first_block = method.complete_length(chunk.start)
        first_output = len(plan.outputs)
        if method.needs_parallel(chunk.start, chunk.stop):
            _add_parallel(plan, method, index, chunk, first_block)
        _add_sequential(plan, method, index, chunk, first_block, first_output)
    return plan


def _add_parallel(plan: StepPlan, method: Method, index: int, chunk: Chunk, first_block: int) -> None:
    """Refresh rows of every cycle that has ended and is not in the pool yet, then the blocks of the chunk's cycle heads."""
    rows, tokens = plan.parallel, chunk.tokens
    last_block = method.cycle_start(chunk.stop - 1)
    if method.refreshes:
        for position in range(method.parallel_entries(chunk.start), last_block):
            rows.add(index, position, tokens[position], is_written=True, history_length=position + 1)
    for block in range(first_block, last_block + 1, method.cycle_length):
        begin = len(rows)
        for offset in range(method.cycle_length):
            position = block + offset
            token_id = tokens[position] if is_cycle_head(position, method.cycle_length) else method.mask_token_id
            seen = method.cycle_length if method.is_bidirectional else offset + 1
            plan.outputs.append(len(rows))
            if method.refreshes:
                rows.add(index, position, token_id, is_written=False, history_length=block, local=(begin, begin + seen))
            else:
                rows.add(index, position, token_id, is_written=True, history_length=block + seen)
    plan.kept.append(Kept(chunk.slot, len(plan.outputs) - method.cycle_length))


def _add_sequential(plan: StepPlan, method: Method, index: int, chunk: Chunk, first_block: int, first_output: int) -> None:
    """One real row per token, each after the one before it (docs/method.md, section 6.1)."""
    last_block = method.cycle_start(chunk.stop - 1)
    for position in range(chunk.start, chunk.stop):
        plan.sequential.add(index, position, chunk.tokens[position], is_written=True, history_length=position + 1)
        is_of_earlier_block = not method.is_vanilla and first_block <= position < last_block
        plan.from_output.append(first_output + position - first_block if is_of_earlier_block else -1)
    plan.last_rows.append(len(plan.sequential) - 1)
