"""Scheduling by itself: alignment, pieces of prompts, admission and preemption, without any tensor being computed."""

import pytest

from megatron_dmtd.inference.scheduler import Scheduler, Sequence
from tests.inference.kv.stores import mixed_store, small_store


def scheduler(num_pages: int = 64, *, store=None, **options) -> Scheduler:
    settings = {"num_slots": 4, "chunk_tokens": 8, "align_heads": True, "prefix_index": None, **options}
    return Scheduler(store or small_store(num_pages=num_pages, page_size=4), **settings)


def advance(own: Scheduler) -> list[tuple[int, int, int]]:
    """One step: (first token of the sequence, start, stop) of each part. Complete ones get a new token."""
    step = own.schedule()
    shown = [(part.sequence.tokens[0], part.chunk.start, part.chunk.stop) for part in step]
    complete = [part.sequence for part in step if part.is_complete]
    own.finish_step(step)
    for sequence in complete:
        sequence.tokens.append(0)
    own.store.check_integrity(own.owned())
    return shown


def prompt(name: int, length: int) -> Sequence:
    return Sequence(tokens=[name] * length)


def test_a_long_prompt_is_taken_in_whole_cycles_and_ends_anywhere():
    own = scheduler(chunk_tokens=6)
    own.add(prompt(1, 15))
    assert [advance(own)[0][1:] for _ in range(5)] == [(0, 4), (4, 8), (8, 12), (12, 15), (15, 16)]


def test_a_budget_below_a_cycle_still_advances():
    own = scheduler(chunk_tokens=3)
    own.add(prompt(1, 9))
    assert [advance(own)[0][1:] for _ in range(4)] == [(0, 3), (3, 4), (4, 7), (7, 8)]


def test_requests_out_of_phase_wait_until_the_clock_comes_round():
    own = scheduler(chunk_tokens=64)
    own.add(prompt(1, 5))
    own.add(prompt(2, 7))
    own.add(prompt(3, 8))
    assert advance(own) == [(1, 0, 5), (2, 0, 7), (3, 0, 8)]
    assert advance(own) == [(3, 8, 9)]
    assert advance(own) == [(1, 5, 6), (3, 9, 10)]
    assert advance(own) == [(1, 6, 7), (3, 10, 11)]
    assert advance(own) == [(1, 7, 8), (2, 7, 8), (3, 11, 12)]
    for _ in range(2):
        assert sorted(name for name, start, _ in advance(own) if start % 4 == 0) == [1, 2, 3]
        assert [len(advance(own)) for _ in range(3)] == [3, 3, 3]


def test_the_clock_starts_with_the_request_farthest_from_its_head():
    own = scheduler(chunk_tokens=64)
    own.add(prompt(1, 7))
    own.add(prompt(2, 6))
    advance(own)
    assert [advance(own) for _ in range(3)] == [[(2, 6, 7)], [(1, 7, 8), (2, 7, 8)], [(1, 8, 9), (2, 8, 9)]]


def test_without_alignment_nobody_waits():
    own = scheduler(chunk_tokens=64, align_heads=False)
    for name, length in ((1, 5), (2, 7)):
        own.add(prompt(name, length))
    advance(own)
    assert advance(own) == [(1, 5, 6), (2, 7, 8)]


def test_pieces_of_prompts_go_with_the_heads():
    own = scheduler()
    own.add(prompt(1, 4))
    advance(own)
    own.add(prompt(2, 20))
    steps = [advance(own) for _ in range(6)]
    assert steps[0] == [(1, 4, 5), (2, 0, 8)]
    assert [len(step) for step in steps[1:4]] == [1, 1, 1]
    assert steps[4] == [(1, 8, 9), (2, 8, 16)]


def test_sequences_beyond_the_slots_wait_in_order():
    own = scheduler(num_slots=1, chunk_tokens=64)
    first, second = prompt(1, 4), prompt(2, 4)
    own.add(first)
    own.add(second)
    assert advance(own) == [(1, 0, 4)]
    own.remove(first)
    assert advance(own) == [(2, 0, 4)]
    own.remove(second)
    assert own.is_idle
    assert own.schedule() == []


def test_a_prompt_is_let_in_only_if_its_pages_are_not_promised_to_others():
    own = scheduler(num_pages=8, chunk_tokens=4)
    own.add(prompt(1, 20))
    own.add(prompt(2, 20))
    advance(own)
    assert len(own.running) == 1
    assert own.waiting[0].tokens[0] == 2


def test_the_youngest_gives_way_and_comes_back_before_others():
    own = scheduler(num_pages=7, num_slots=2, chunk_tokens=64)
    old, young, third = prompt(1, 12), prompt(2, 12), prompt(3, 4)
    own.add(old)
    own.add(young)
    own.add(third)
    tables = young.tables
    seen = [advance(own) for _ in range(6)]
    assert young.tables is not tables, "the runner could not tell that the slot's pages are others"
    assert young.num_preemptions == 1
    assert young.slot == -1 and young.num_taken == 0
    assert list(own.waiting) == [young, third]
    assert seen[0] == [(1, 0, 12), (2, 0, 12)]
    assert old.num_preemptions == 0
    own.remove(old)
    assert advance(own)[0] == (2, 0, len(young.tokens) - 1)
    own.remove(young)
    own.remove(third)
    own.store.check_integrity([])


def test_a_sequence_that_cannot_fit_alone_is_a_broken_promise():
    own = scheduler(num_pages=2, chunk_tokens=64)
    own.add(prompt(1, 12))
    with pytest.raises(AssertionError, match="fits alone"):
        own.schedule()


def test_a_group_without_free_pages_is_enough_to_make_the_youngest_give_way():
    """In a mixed model: all groups are asked, and the pages of all are given back."""
    own = scheduler(store=mixed_store(num_pages=7, page_size=4), num_slots=2, chunk_tokens=64)
    old, young = prompt(1, 12), prompt(2, 12)
    own.add(old)
    own.add(young)
    hidden = own.store.groups["sequential/window-6/2x8"].pages
    hidden._free, kept_back = hidden._free[:6], hidden._free[6:]  # one page less than the others have
    step = own.schedule()
    assert len(step) == 2
    own.finish_step(step)
    for sequence in (old, young):
        sequence.tokens.append(0)
    assert [part.sequence for part in own.schedule()] == [old]
    assert young.slot == -1 and young.num_preemptions == 1
    # 13 tokens: 12 entries in parallel groups, 13 in sequential ones
    assert [group.pages.num_free for group in own.store.groups.values()] == [4, 4, 2, 3]
    hidden._free += kept_back
    own.store.check_integrity(own.owned())
