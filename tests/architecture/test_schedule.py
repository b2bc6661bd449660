import dataclasses

import pytest

from megatron_dmtd.architecture import Schedule, Stream, make_schedule
from megatron_dmtd.cycle import ORDINARY, VARIANTS, Method
from tests.architecture.decoders import decoder, looped, windowed

REAL, SHADOW = Stream.REAL, Stream.SHADOW


def schedule(variant: str, *, split: int = 2) -> Schedule:
    return make_schedule(decoder(), Method(variant=variant, cycle_length=4, mask_token_id=9, num_parallel_layers=split))


def test_vanilla_visits_every_layer_once_with_the_real_stream():
    found = make_schedule(decoder(), ORDINARY)
    assert [visit.layer for visit in found.visits] == [0, 1, 2, 3]
    assert {(visit.streams, visit.outputs, visit.stored) for visit in found.visits} == {((REAL,), (REAL,), REAL)}
    assert [group.name for group in found.kv_groups] == ["sequential"] and found.split == 0


@pytest.mark.parametrize("variant", [name for name, (history, _) in VARIANTS.items() if history == "shadow"])
def test_norefresh_keeps_the_shadow_stream_of_its_parallel_layers(variant):
    found = schedule(variant)
    assert found.split == 2
    assert [(visit.streams, visit.outputs, visit.stored) for visit in found.visits] == [
        ((SHADOW,), (SHADOW,), SHADOW),
        ((SHADOW,), (SHADOW,), SHADOW),
        ((REAL,), (REAL,), REAL),
        ((REAL,), (REAL,), REAL),
    ]


@pytest.mark.parametrize("variant", [name for name, (history, _) in VARIANTS.items() if history == "real"])
def test_refresh_ends_its_real_stream_at_the_last_parallel_layer(variant):
    found = schedule(variant)
    assert [(visit.streams, visit.outputs, visit.stored) for visit in found.visits[:2]] == [
        ((REAL, SHADOW), (REAL, SHADOW), REAL),
        ((REAL, SHADOW), (SHADOW,), REAL),
    ]
    assert found.streams_into(1) == (REAL, SHADOW) and found.streams_into(2) == (REAL,) and found.streams_into(4) == (REAL,)


def test_groups_hold_as_many_entries_as_their_pass_has_taken():
    refresh, norefresh = schedule("causal-refresh"), schedule("causal-norefresh")
    for found, expected in ((refresh, [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]), (norefresh, [0, 4, 4, 4, 4, 8, 8, 8, 8, 12])):
        parallel, sequential = found.group("parallel"), found.group("sequential")
        assert [parallel.num_entries(found.method, tokens) for tokens in range(10)] == expected
        assert [sequential.num_entries(found.method, tokens) for tokens in range(10)] == list(range(10))
        assert (parallel.visits, sequential.visits) == ((0, 1), (2, 3))


def test_layers_that_store_otherwise_have_a_group_of_their_own():
    found = make_schedule(windowed(window=8, pattern=(True, False, True, False)), ORDINARY)
    assert {group.name: (group.visits, group.window) for group in found.kv_groups} == {
        "sequential/window-8/2x8": ((0, 2), 8),
        "sequential/full/2x8": ((1, 3), None),
    }
    assert [(visit.kv_group.split("/")[1], visit.kv_place) for visit in found.visits] == [
        ("window-8", 0),
        ("full", 0),
        ("window-8", 1),
        ("full", 1),
    ]


def test_a_schedule_whose_visits_leave_out_a_layer_is_no_schedule():
    found = schedule("causal-refresh")
    with pytest.raises(AssertionError, match="nobody visits"):
        dataclasses.replace(found, decoder=dataclasses.replace(found.decoder, layers=found.decoder.layers * 2))


def test_looped_layers_are_visited_once_per_loop():
    found = make_schedule(looped(), ORDINARY)
    assert [(visit.layer, visit.loop) for visit in found.visits] == [
        (0, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 0),
    ]  # fmt: skip
    assert [index for index, visit in enumerate(found.visits) if visit.enters_loop] == [1, 3, 5]
    assert [index for index, visit in enumerate(found.visits) if visit.leaves_loop] == [2, 4, 6]
    assert [visit.layer for visit in make_schedule(looped(), ORDINARY, num_loops=1).visits] == [0, 1, 2, 3]


def test_each_loop_has_places_of_its_own_unless_only_the_last_is_kept():
    each = make_schedule(looped(), ORDINARY)
    assert [visit.kv_place for visit in each.visits] == list(range(8)) and each.group("sequential").num_places == 8
    last = make_schedule(looped(), ORDINARY, kv_cache_mode="last_loop")
    assert [visit.kv_place for visit in last.visits] == [0, 1, 2, 1, 2, 1, 2, 3]
    assert (
        last.group("sequential").num_places == make_schedule(looped(), ORDINARY, num_loops=1).group("sequential").num_places == 4
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loop_of_parallel_layers_runs_once_per_cycle(variant):
    method = Method(variant=variant, cycle_length=4, mask_token_id=9, num_parallel_layers=3)
    found = make_schedule(looped(), method)
    assert found.split == 7 and [visit.pass_name for visit in found.visits] == ["parallel"] * 7 + ["sequential"]
    # The real stream of a refreshed history ends at the last parallel visit, not at the last visit of the first loop.
    assert [len(visit.outputs) for visit in found.visits[:7]] == [len(method.streams)] * 6 + [1]
    with pytest.raises(AssertionError, match="a loop in both passes"):
        make_schedule(looped(), dataclasses.replace(method, num_parallel_layers=2))
