"""The rule, against docs/method.md one pair of slots at a time, on numbers, NumPy arrays and torch tensors."""

import numpy as np
import pytest
import torch

from megatron_dmtd.cycle import VANILLA, VARIANTS, complete_length, cycle_id, is_cycle_head, phase, shadow_ids, visible
from tests.oracles.visibility import Slot, may_read, walk

CYCLE_LENGTHS = (1, 2, 3, 4, 5)


def layouts(cycle_length: int) -> list[list[int]]:
    """One to three documents, complete and cut inside a cycle, of up to three cycles."""
    whole = [[1], [3], [1, 1], [2, 1], [1, 2, 1]]
    rows = [[cycles * cycle_length for cycles in row] for row in whole]
    return [*rows, [cycle_length + 1], [2 * cycle_length - 1, 1]]


def both_streams(lengths: list[int], cycle_length: int) -> list[Slot]:
    return walk("real", lengths, cycle_length) + walk("shadow", lengths, cycle_length)


def expected(slots: list[Slot], variant: str) -> list[list[bool]]:
    return [[may_read(query, key, variant) for key in slots] for query in slots]


def visible_grid(slots: list[Slot], variant: str, cycle_length: int, array):
    """`visible` for all pairs at once, on arrays that `array` makes from lists."""
    history, block_attention = VARIANTS[variant]
    is_real = array([slot.stream == "real" for slot in slots])
    document, position = array([slot.document for slot in slots]), array([slot.position for slot in slots])
    return visible(
        query_is_real=is_real[:, None],
        query_document=document[:, None],
        query_position=position[:, None],
        key_is_real=is_real[None, :],
        key_document=document[None, :],
        key_position=position[None, :],
        cycle_length=cycle_length,
        history=history,
        block_attention=block_attention,
    )


def test_the_four_variants_are_the_two_options_crossed():
    assert VARIANTS == {
        "causal-norefresh": ("shadow", "causal"),
        "causal-refresh": ("real", "causal"),
        "bidirectional-norefresh": ("shadow", "bidirectional"),
        "bidirectional-refresh": ("real", "bidirectional"),
    }
    assert VANILLA == "vanilla" and VANILLA not in VARIANTS


@pytest.mark.parametrize("cycle_length", CYCLE_LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_visible_is_the_specification_on_arrays(variant, cycle_length):
    for lengths in layouts(cycle_length):
        slots = both_streams(lengths, cycle_length)
        want = expected(slots, variant)
        assert any(map(any, want)) and not all(map(all, want))
        on_numpy = visible_grid(slots, variant, cycle_length, np.array)
        on_torch = visible_grid(slots, variant, cycle_length, torch.tensor)
        assert on_numpy.dtype == np.bool_ and on_torch.dtype == torch.bool
        assert on_numpy.tolist() == want == on_torch.tolist()


@pytest.mark.parametrize("cycle_length", [1, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_visible_is_the_specification_on_plain_numbers(variant, cycle_length):
    history, block_attention = VARIANTS[variant]
    slots = both_streams([2 * cycle_length, cycle_length], cycle_length)
    for query in slots:
        for key in slots:
            answer = visible(
                query_is_real=query.stream == "real",
                query_document=query.document,
                query_position=query.position,
                key_is_real=key.stream == "real",
                key_document=key.document,
                key_position=key.position,
                cycle_length=cycle_length,
                history=history,
                block_attention=block_attention,
            )
            assert type(answer) is bool
            assert answer == may_read(query, key, variant), (query, key)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_shadow_query_reads_itself(variant):
    slots = walk("shadow", [8, 4], 4)
    assert visible_grid(slots, variant, 4, np.array).diagonal().all()


@pytest.mark.parametrize("cycle_length", CYCLE_LENGTHS)
def test_cycle_id_phase_and_head_count_along_a_document(cycle_length):
    slots = walk("real", [3 * cycle_length + 1], cycle_length)
    for array in (np.array, torch.tensor):
        position = array([slot.position for slot in slots])
        assert cycle_id(position, cycle_length).tolist() == [slot.cycle for slot in slots]
        assert phase(position, cycle_length).tolist() == [slot.slot_in_cycle for slot in slots]
        assert is_cycle_head(position, cycle_length).tolist() == [slot.slot_in_cycle == 0 for slot in slots]
    for slot in slots:
        assert cycle_id(slot.position, cycle_length) == slot.cycle
        assert phase(slot.position, cycle_length) == slot.slot_in_cycle
        assert is_cycle_head(slot.position, cycle_length) is (slot.slot_in_cycle == 0)


def test_cycles_of_four_literally():
    assert [cycle_id(position, 4) for position in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert [phase(position, 4) for position in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("cycle_length", CYCLE_LENGTHS)
def test_complete_length_is_the_least_multiple_that_holds_the_length(cycle_length):
    for length in range(4 * cycle_length + 1):
        want = next(total for total in range(0, 1000, cycle_length) if total >= length)
        assert complete_length(length, cycle_length) == want
    assert complete_length(np.array([0, 1, 4, 5]), 4).tolist() == [0, 4, 4, 8]


def test_shadow_ids_keep_heads_and_restart_at_each_document():
    token_ids, position = [10, 11, 12, 13, 14, 20, 21], [0, 1, 2, 3, 4, 0, 1]
    want = [10, 9, 9, 9, 14, 20, 9]
    for array in (np.array, torch.tensor):
        assert shadow_ids(array(token_ids), array(position), cycle_length=4, mask_token_id=9).tolist() == want
    pairs = zip(token_ids, position, strict=True)
    assert [shadow_ids(token, place, cycle_length=4, mask_token_id=9) for token, place in pairs] == want


def test_shadow_ids_keep_the_integer_type_and_large_ids():
    ids = shadow_ids(torch.tensor([151935, 151935]), torch.tensor([4, 5]), cycle_length=4, mask_token_id=151660)
    assert ids.dtype == torch.int64 and ids.tolist() == [151935, 151660]


def test_cycles_of_one_token_have_no_mask_slot():
    token_ids = torch.arange(5)
    assert torch.equal(shadow_ids(token_ids, torch.arange(5), cycle_length=1, mask_token_id=99), token_ids)
