"""Cache operations of a request: refusals, positions and expiries; the oracle is token by token."""

import random

import numpy as np
import pytest

from megatron_dmtd.errors import DataError
from megatron_dmtd.inference.cache_ops.program import MAX_OPERATIONS, NEVER, Timeline, parse_program
from tests.oracles.cache_operations import Plan, state_after
from tests.oracles.programs import random_program

WORKED = [{"after": 4, "drop": [[0, 1]]}, {"after": 4, "reposition": True}, {"after": 7, "drop": [[2, 3]]}]
WORKED += [{"after": 7, "reposition": True}]


def timeline(program: object, num_tokens: int, cycle_length: int = 1, *, more: int = 8) -> Timeline:
    return Timeline(parse_program(program, num_tokens), cycle_length, num_tokens + more)


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ({"after": 1}, "cache="),
        ("drop", "cache="),
        (7, "cache="),
        ([3], "cache[0]"),
        ([{"after": 4, "drop": []}, {"drop": [[0, 1]]}], "cache[1]: no after"),
        ([{"after": "4", "drop": [[0, 1]]}], "cache[0].after: '4'"),
        ([{"after": True, "drop": [[0, 1]]}], "cache[0].after"),
        ([{"after": 4.0, "drop": [[0, 1]]}], "cache[0].after"),
        ([{"after": -1, "reposition": True}], "cache[0].after=-1"),
        ([{"after": 11, "reposition": True}], "cache[0].after=11"),
        ([{"after": 5, "drop": [[0, 1]]}, {"after": 4, "drop": [[0, 1]]}], "cache[1].after=4 after 5"),
        ([{"after": 4, "drop": [[0, 1], [2, 5]]}], "cache[0].drop[1]=[2, 5] with after=4"),
        ([{"after": 4, "drop": [[3, 2]]}], "cache[0].drop[0]=[3, 2]"),
        ([{"after": 4, "drop": [[-1, 2]]}], "cache[0].drop[0]=[-1, 2]"),
        ([{"after": 4, "drop": [[0, 1.5]]}], "cache[0].drop[0]: 1.5"),
        ([{"after": 4, "drop": [["0", 1]]}], "cache[0].drop[0]: '0'"),
        ([{"after": 4, "drop": [[0, 1, 2]]}], "cache[0].drop[0]=[0, 1, 2]"),
        ([{"after": 4, "drop": [3]}], "cache[0].drop[0]=3"),
        ([{"after": 4, "drop": 3}], "cache[0].drop=3"),
        ([{"after": 4, "reposition": 1}], "cache[0].reposition=1"),
        ([{"after": 4}], "cache[0]: only after"),
        ([{"after": 4, "drop": [], "hide": 1}], "cache[0]: unknown key 'hide'"),
        ([{"after": 0, "reposition": True}], "cache[0]: a reposition with nothing active"),
        ([{"after": 4, "drop": [[0, 4]]}, {"after": 4, "reposition": True}], "cache[1]: a reposition with nothing active"),
        ([{"after": 1, "drop": []}] * (MAX_OPERATIONS + 1), f"cache[{MAX_OPERATIONS}]"),
    ],
)
def test_a_wrong_program_is_refused_by_its_index(program, named):
    with pytest.raises(DataError) as refusal:
        timeline(program, 10)
    assert named in refusal.value.found


def test_the_worked_example():
    one = timeline(WORKED, 8, more=1)
    assert one.birth[:8].tolist() == [0, 1, 2, 3, 3, 4, 5, 5]
    state = one.state(8)
    assert (state.active, state.positions, state.next_position) == ([1, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5], 6)
    assert one.cuts == [4, 7] and one.records == {4: (((0, 1),), True), 7: (((2, 3),), True)}


@pytest.mark.parametrize("cycle_length", [1, 3, 4])
def test_everything_is_the_oracles(cycle_length):
    """Births, expiries, stages, positions of all that is seen, and the state after every number of tokens."""
    chance, moved = random.Random(cycle_length), 0
    for _ in range(150):
        num_tokens = chance.randrange(1, 30)
        program = random_program(chance, num_tokens, cycle_length)
        one, plan = timeline(program, num_tokens, cycle_length), Plan(program, cycle_length, num_tokens)
        assert one.birth[:num_tokens].tolist() == plan.birth
        assert [None if expiry >= min(num_tokens, NEVER) else expiry for expiry in one.expiry[:num_tokens].tolist()] == [
            None if expiry >= num_tokens else expiry for expiry in plan.expiry
        ]
        for query in range(num_tokens):
            seen = [token for token in range(query + 1) if plan.sees(query, token)]
            positions = one.positions(one.stage_of(query))
            assert positions[seen].tolist() == [plan.place(query, token) for token in seen]
        state = one.state(num_tokens)
        expected = state_after(program, cycle_length, num_tokens)
        assert dict(zip(state.active, state.positions)) == expected.position
        assert state.next_position == expected.next_position
        moved += expected.num_repositions
    assert moved > 20


def test_what_changes_nothing_leaves_no_record():
    program = [{"after": 3, "reposition": True}, {"after": 5, "drop": [[1, 2]]}, {"after": 6, "drop": [[1, 2], [2, 2]]}]
    assert timeline(program, 8).records == {5: (((1, 2),),)}
    merged = timeline([{"after": 6, "drop": [[3, 5]]}, {"after": 6, "drop": [[1, 3], [5, 6]]}], 8)
    assert merged.records == {6: (((1, 6),),)}


def test_a_position_beyond_the_limit_is_refused_and_a_raw_length_beyond_it_is_not():
    program = [{"after": 6, "drop": [[0, 4]]}, {"after": 6, "reposition": True}]
    one = timeline(program, 10)
    one.check_positions(10, 6)
    with pytest.raises(DataError) as refusal:
        one.check_positions(11, 6)
    assert "position 6 of token 10" in refusal.value.found
    assert np.array_equal(one.birth[:10], [0, 1, 2, 3, 4, 5, 2, 3, 4, 5])
