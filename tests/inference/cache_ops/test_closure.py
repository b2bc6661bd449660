"""Which cycles must be computed, against brute force over random holes."""

import random

import numpy as np
import pytest

from megatron_dmtd.inference.cache_ops.closure import missing_cycles
from megatron_dmtd.inference.cache_ops.program import Timeline, parse_program
from tests.oracles.programs import random_program


def brute_force(expiry: list[int], is_cached: list[bool], num_tokens: int, length: int) -> list[int]:
    """Grow the set until no member reads a token that is neither cached nor in the set."""
    found = {(num_tokens - 1) // length}
    while True:
        more = {
            token // length
            for token in range(num_tokens)
            for cycle in found
            if token // length < cycle and cycle * length < expiry[token] and not is_cached[token]
        }
        if more <= found:
            return sorted(found)
        found |= more


@pytest.mark.parametrize("length", [1, 4])
def test_a_thousand_hole_graphs(length):
    chance, saved = random.Random(length), 0
    for _ in range(500):
        num_tokens = chance.randrange(1, 40)
        program = random_program(chance, num_tokens, length)
        timeline = Timeline(parse_program(program, num_tokens), length, num_tokens)
        share = chance.random()
        is_cached = np.array([chance.random() < share for _ in range(timeline.num_tokens)])
        found = missing_cycles(timeline, is_cached, num_tokens, all_of_them=False)
        assert found == brute_force(timeline.expiry.tolist(), is_cached.tolist(), num_tokens, length)
        holes = {token // length for token in range(num_tokens) if not is_cached[token]}
        saved += len(holes - set(found))
        assert missing_cycles(timeline, is_cached, num_tokens, all_of_them=True) == list(range((num_tokens - 1) // length + 1))
    assert saved > 100, "holes that nothing reads"
