"""The oracle of cache operations against its twin, against the oracle without operations, and on a worked example."""

import random

import pytest
import torch

from tests.oracles.cache_operations import Plan, edited_logits, masked_logits, state_after
from tests.oracles.parallel_dmtd import FOUR_VARIANTS, Shape, random_weights, teacher_forced_logits, vanilla_logits
from tests.oracles.programs import random_program

ORDINARY = Shape(num_layers=3, num_parallel_layers=0)
CYCLED = Shape(num_layers=3, num_parallel_layers=1, cycle_length=3)
WORKED = [{"after": 4, "drop": [[0, 1]]}, {"after": 4, "reposition": True}, {"after": 7, "drop": [[2, 3]]}]
WORKED += [{"after": 7, "reposition": True}]


def test_the_worked_example():
    plan, state = Plan(WORKED, 1, 8), state_after(WORKED, 1, 8)
    assert plan.birth == [0, 1, 2, 3, 3, 4, 5, 5]
    assert state.position == {1: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5} and state.next_position == 6
    assert plan.segments == [(0, 4), (4, 7), (7, 8)]
    assert len(plan.occurrences) == 15
    assert {(t, plan.place(6, t)) for t in range(4) if plan.sees(6, t)} == {(1, 0), (2, 1), (3, 2)}
    assert {(t, plan.place(7, t)) for t in range(7) if plan.sees(7, t)} == {(1, 0), (3, 1), (4, 2), (5, 3), (6, 4)}
    assert {position for token, position in plan.occurrences if token == 3} == {3, 2, 1}


@pytest.mark.parametrize("kind", [("", ""), *FOUR_VARIANTS], ids=["ordinary", *("-".join(kind) for kind in FOUR_VARIANTS)])
@pytest.mark.parametrize("windows", [(), (5, None, 4)], ids=["", "windows"])
def test_the_mask_is_the_sequence_of_edits(kind, windows):
    shape = Shape(**{**vars(CYCLED if kind[0] else ORDINARY), "windows": windows})
    weights, chance, acted = random_weights(shape, seed=1), random.Random(str(kind)), 0
    for _ in range(3):
        ids = [chance.randrange(60) for _ in range(17)]
        program = random_program(chance, len(ids), shape.cycle_length if kind[0] else 1)
        one, other = (
            compute(weights, shape, ids, program, history=kind[0], block_attention=kind[1])
            for compute in (edited_logits, masked_logits)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
        acted += state_after(program, shape.cycle_length if kind[0] else 1, len(ids)).num_repositions
    assert acted > 0


@pytest.mark.parametrize("kind", [("", ""), *FOUR_VARIANTS])
def test_without_operations_it_is_the_other_oracle(kind):
    shape, ids = CYCLED if kind[0] else ORDINARY, [7, 3, 9, 9, 1, 50, 22, 8]
    weights = random_weights(shape, seed=2)
    names = {"history": kind[0], "block_attention": kind[1]}
    expected = teacher_forced_logits(weights, shape, **names, token_ids=ids) if kind[0] else vanilla_logits(weights, shape, ids)
    torch.testing.assert_close(edited_logits(weights, shape, ids, [], **names), expected, rtol=0, atol=1e-11)


def test_what_must_differ_differs_and_what_precedes_an_operation_is_the_same_bits():
    weights, ids = random_weights(ORDINARY, seed=3), [5, 17, 33, 2, 41, 9, 28, 14, 6, 55]
    drop, reposition = {"after": 5, "drop": [[1, 4]]}, {"after": 5, "reposition": True}
    plain, dropped, both, other_order = (
        edited_logits(weights, ORDINARY, ids, program) for program in ([], [drop], [drop, reposition], [reposition, drop])
    )
    deleted = vanilla_logits(weights, ORDINARY, ids[:1] + ids[4:])
    split = [{"after": 4, "drop": [[1, 3]]}, {"after": 5, "drop": [[3, 4]]}, reposition]
    assert all(torch.equal(logits[:5], plain[:5]) for logits in (dropped, both, other_order))
    for one, two in [
        (dropped[5:], plain[5:]),
        (dropped[5:], deleted[2:]),
        (both[5:], deleted[2:]),
        (both, dropped),
        (both, other_order),
        (both, edited_logits(weights, ORDINARY, ids, split)),
    ]:
        assert (one - two).abs().max() > 1e-2
