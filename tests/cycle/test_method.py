import pytest

from megatron_dmtd.cycle import ORDINARY, VARIANTS, Method


def method(variant: str) -> Method:
    return Method(variant=variant, cycle_length=4, mask_token_id=7, num_parallel_layers=2)


def test_the_four_variants_answer_by_their_names():
    for variant in VARIANTS:
        found = method(variant)
        refreshes = variant.endswith("-refresh")
        assert found.streams == (("real", "shadow") if refreshes else ("shadow",))
        assert found.is_bidirectional == variant.startswith("bidirectional")
        assert found.shadow_is_causal == (variant == "causal-norefresh")
        assert found.history == ("real" if refreshes else "shadow") and not found.is_vanilla


def test_a_step_refreshes_the_cycles_that_have_ended_and_are_not_stored():
    found = method("bidirectional-refresh")
    assert [found.refreshed(start, start + 1) for start in (0, 3, 4, 5, 8)] == [
        range(0, 0), range(0, 0), range(0, 4), range(4, 4), range(4, 8)
    ]  # fmt: skip
    assert found.refreshed(0, 9) == range(0, 8)  # a prompt: all but its last cycle
    for other in (method("causal-norefresh"), method("bidirectional-norefresh"), ORDINARY):
        assert not any(found for found in (other.refreshed(0, 9), other.refreshed(5, 9)))


def test_vanilla_has_no_cycles_and_no_parallel_entries():
    assert ORDINARY.is_vanilla and ORDINARY.streams == ("real",) and not ORDINARY.is_bidirectional
    assert not ORDINARY.shadow_is_causal  # it has no shadow stream
    assert not ORDINARY.needs_parallel(0, 100) and ORDINARY.parallel_entries(100) == 0 and ORDINARY.furthest_stop(3, 90) == 90


def test_the_parallel_caches_hold_whole_cycles():
    refresh, norefresh = method("causal-refresh"), method("causal-norefresh")
    assert [refresh.parallel_entries(tokens) for tokens in range(10)] == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert [norefresh.parallel_entries(tokens) for tokens in range(10)] == [0, 4, 4, 4, 4, 8, 8, 8, 8, 12]


def test_a_step_runs_the_parallel_layers_when_it_meets_a_head():
    found = method("bidirectional-refresh")
    assert [found.needs_parallel(start, start + 1) for start in range(6)] == [True, False, False, False, True, False]
    assert found.needs_parallel(1, 5) and not found.needs_parallel(1, 4)


def test_a_chunk_that_starts_inside_a_cycle_ends_with_it():
    found = method("causal-norefresh")
    assert [found.furthest_stop(start, 11) for start in range(6)] == [11, 4, 4, 4, 11, 8]


@pytest.mark.parametrize(
    "fields", [{"variant": "vanilla", "cycle_length": 4}, {"variant": "causal-refresh"}, {"variant": "backwards"}]
)
def test_contradictions_are_no_method(fields):
    with pytest.raises(AssertionError):
        Method(**fields)
