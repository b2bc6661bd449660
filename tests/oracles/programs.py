"""Random lists of cache operations that are valid for a text, for tests."""

from __future__ import annotations

import random


def random_program(chance: random.Random, num_tokens: int, cycle_length: int, *, last: int | None = None) -> list[dict]:
    """Up to six operations with boundaries of at most `last` (default: `num_tokens`), in which no reposition finds nothing."""
    last = num_tokens if last is None else last
    program: list[dict] = []
    active: set[int] = set()
    known = 0
    for after in sorted(chance.randrange(1, last + 1) for _ in range(chance.randrange(1, 7))):
        head = -(-after // cycle_length) * cycle_length
        active |= set(range(known, head))
        known = max(known, head)
        if chance.random() < 0.6:
            begins = [chance.randrange(after) for _ in range(chance.randrange(1, 3))]
            ranges = [[begin, chance.randrange(begin + 1, after + 1)] for begin in begins]
            active -= {token for begin, end in ranges for token in range(begin, end)}
            program.append({"after": after, "drop": ranges})
        if active and head <= num_tokens and chance.random() < 0.6:
            program.append({"after": after, "reposition": True})
    return program
