"""Which cycles of a prompt must be computed, given what is cached. Numbers only.

The last cycle is computed in any case, since its logits are wanted. A cycle before it must be computed exactly if a later one
that will be computed reads a token of it that is not cached. One reverse scan finds them all: a token that some later one reads
is read by the nearest that comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dmtd.inference.cache_ops.program import Indices, Timeline


def missing_cycles(
    timeline: Timeline, is_cached: Sequence[bool] | np.ndarray, num_tokens: int, *, all_of_them: bool
) -> list[int]:
    """Cycles to compute for a text of `num_tokens`, in order. `is_cached`: of each token; `all_of_them` asks for all cycles."""
    length = timeline.cycle_length
    last = (num_tokens - 1) // length
    if all_of_them:
        return list(range(last + 1))
    needed_until = _latest_unread(timeline.expiry, np.asarray(is_cached, bool), last * length, length)
    found, following = [last], last * length
    for cycle in range(last - 1, -1, -1):
        if needed_until[cycle] > following:
            found.append(cycle)
            following = cycle * length
    return found[::-1]


def _latest_unread(expiry: Indices, is_cached: np.ndarray, num_tokens: int, length: int) -> list[int]:
    """For each cycle the latest expiry of its tokens that are not cached; 0 if all are."""
    open_until = np.where(is_cached[:num_tokens], 0, expiry[:num_tokens])
    return open_until.reshape(-1, length).max(axis=1).tolist() if num_tokens else []
