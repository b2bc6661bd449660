"""Who sees whom in the parallel layers, read off docs/method.md, sections 1.4 and 2 to 5, one pair of slots at a time.

Imports nothing of the package. Cycles are counted while walking along a document, never computed by division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One slot of a stream."""

    stream: str
    document: int
    position: int
    cycle: int
    slot_in_cycle: int


def walk(stream: str, document_lengths: Sequence[int], cycle_length: int) -> list[Slot]:
    """The slots of one stream, document after document."""
    slots = []
    for document, length in enumerate(document_lengths):
        cycle, slot_in_cycle = 0, 0
        for position in range(length):
            slots.append(Slot(stream, document, position, cycle, slot_in_cycle))
            slot_in_cycle += 1
            if slot_in_cycle == cycle_length:
                cycle, slot_in_cycle = cycle + 1, 0
    return slots


def may_read(query: Slot, key: Slot, variant: str, window: int | None = None) -> bool:
    """Whether `query` may read `key`; a `window` of w hides what lies w or more positions before the query."""
    if query.document != key.document:
        return False
    if window is not None and key.position <= query.position - window:
        return False
    if query.stream == "real":
        return key.stream == "real" and key.position <= query.position
    if variant == "causal-norefresh":
        return key.stream == "shadow" and key.position <= query.position
    if variant == "bidirectional-norefresh":
        return key.stream == "shadow" and (key.cycle == query.cycle or key.position <= query.position)
    if variant == "causal-refresh":
        if key.stream == "real":
            return key.cycle < query.cycle
        return key.cycle == query.cycle and key.position <= query.position
    assert variant == "bidirectional-refresh", variant
    if key.stream == "real":
        return key.cycle < query.cycle
    return key.cycle == query.cycle
