"""Checks of a request with cache operations before it is queued, and the test hook that forgets cached tokens. Numbers only."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from megatron_dmtd.architecture import Schedule
from megatron_dmtd.errors import DataError, shown
from megatron_dmtd.inference.cache_ops.pages import StorePages
from megatron_dmtd.inference.cache_ops.program import Operation, Timeline, parse_program
from megatron_dmtd.inference.cache_ops.sequence import EditedSequence, most_page_sets
from megatron_dmtd.inference.cache_ops.tree import CacheTree
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.loops import shared


def timeline_of(program: object, prompt_length: int, max_new_tokens: int, schedule: Schedule, *, prefix_key: int = 0) -> Timeline:
    """A program's meaning for a prompt and its output. Raises `DataError`, which names the index of what is wrong."""
    operations = parse_program(program, prompt_length)
    _check_repositions(operations, schedule)
    num_tokens = prompt_length + max_new_tokens + 1
    return Timeline(operations, schedule.method.cycle_length, num_tokens, prefix_key=prefix_key)


def check_decoder(schedule: Schedule) -> None:
    """Accept a decoder for cache operations, or raise `DataError`."""
    if shared(schedule.decoder) is not None and not schedule.method.is_vanilla:
        raise DataError(
            found="cache operations with kv_mode='last_loop' for a decoder with cycles",
            required="keys and values that do not depend on how a text is cut",
            remedy="decode with kv_mode='per_loop'",
        )


def _check_repositions(operations: Sequence[Operation], schedule: Schedule) -> None:
    has_query_scale = any(layer.attention.query_scale is not None for layer in schedule.decoder.layers)
    moving = next((index for index, one in enumerate(operations) if one.reposition), None)
    if moving is not None and has_query_scale:
        raise DataError(
            found=f"cache[{moving}]: a reposition for a decoder that scales queries after their rotation",
            required="scores that depend on distances alone, which such scales prevent",
            remedy="only drop; positions then stay as they are",
        )


def edited_sequence(
    timeline: Timeline,
    tokens: list[int],
    max_new_tokens: int,
    *,
    store: KVStore,
    tree: CacheTree | None,
    max_length: int,
    computes_all: bool,
) -> EditedSequence:
    """The cache of one sample. Raises `DataError` if a position, or what must be cached at one time, is too much."""
    num_tokens = len(tokens) + max_new_tokens
    timeline.check_positions(num_tokens, max_length)
    _check_pages(timeline, len(tokens), num_tokens, store)
    pages = StorePages(store) if tree is None else tree.pages
    return EditedSequence(timeline, store.method, tokens, pages=pages, tree=tree, computes_all=computes_all)


def _check_pages(timeline: Timeline, prompt_length: int, num_tokens: int, store: KVStore) -> None:
    """Accept a request that fits when it is alone. Only where a simple bound does not show it, its whole course is counted."""
    length = timeline.cycle_length
    copies = sum(stage.length + length for stage in timeline.stages[1:])
    if -(-(timeline.num_tokens + copies) // store.page_size) + 1 <= store.num_pages:
        return
    most = most_page_sets(timeline, store.method, prompt_length, num_tokens, store.page_size)
    if most > store.num_pages:
        raise DataError(
            found=f"{num_tokens} tokens, output included, of which up to {most * store.page_size} must be cached at one time",
            required=f"at most {store.num_pages * store.page_size}",
            remedy="drop earlier, or raise cache_tokens or cache_bytes of the engine",
        )


def evicted(tree: CacheTree | None, timeline: Timeline, tokens: list[int], raw_indices: Iterable[int]) -> int:
    """Forget some tokens of a path. Returns how many of them were cached."""
    count, length, by_cycle = 0, timeline.cycle_length, dict[int, set[int]]()
    for raw in raw_indices:
        index = _index(raw, len(tokens))
        by_cycle.setdefault(index // length, set()).add(index % length)
    node = tree.root if tree is not None else None
    for cycle in range(len(tokens) // length):
        head = cycle * length
        if tree is None or node is None:
            break
        node = tree.child(node, (timeline.node_key(head), tuple(tokens[head : head + length])))
        if node is not None and cycle in by_cycle:
            chosen = [occurrence for occurrence in node.places if occurrence[0] in by_cycle[cycle]]
            count += len({offset for offset, _ in chosen})
            for occurrence in chosen:
                tree.forget(node, occurrence)
    return count


def _index(raw: object, num_tokens: int) -> int:
    try:
        index = operator.index(raw)  # type: ignore[arg-type]
    except TypeError:
        index = -1
    if not 0 <= index < num_tokens:
        raise DataError(
            found=f"raw index {shown(raw)}", required=f"an integer from 0 to {num_tokens - 1}", remedy="name tokens of the text"
        )
    return index
