import dataclasses

import numpy as np
import pytest

from megatron_dmtd.architecture import KVGroup, Schedule, make_schedule, num_parameters
from megatron_dmtd.architecture.flops import (
    decoding_weights,
    head_flops,
    training_flops,
    training_flops_per_token,
    visit_flops,
    visit_pairs,
)
from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.decoder import schedule_of
from megatron_dmtd.cycle import ORDINARY, VARIANTS, Method, mask_grid
from tests.architecture.decoders import decoder, windowed

KINDS = ("vanilla", *VARIANTS)


def method(kind: str, *, split: int = 2) -> Method:
    return ORDINARY if kind == "vanilla" else Method(variant=kind, cycle_length=4, mask_token_id=9, num_parallel_layers=split)


@pytest.mark.parametrize("window", [None, 3, 6, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pairs_of_each_visit_are_those_that_the_rule_shows(kind, window):
    spec = decoder() if window is None else windowed(window=window, pattern=(True,) * 4)
    schedule = make_schedule(spec, method(kind))
    grid = mask_grid([12], variant=kind, cycle_length=4)
    near = grid.queries.position[:, None] - grid.keys.position[None, :] < (window or 10**9)
    for visit in schedule.visits[: schedule.split]:
        rows = np.zeros(len(grid.sees), dtype=bool)
        for stream in visit.outputs:
            rows |= grid.queries.is_real == (stream.value == "real")
        assert visit_pairs(schedule, visit, length=12) == (grid.sees & near)[rows].sum()
    sequential = mask_grid([12], variant="vanilla", cycle_length=1)
    near = sequential.queries.position[:, None] - sequential.keys.position[None, :] < (window or 10**9)
    assert visit_pairs(schedule, schedule.visits[-1], length=12) == (sequential.sees & near).sum()


@pytest.mark.parametrize(("kind", "ratio"), [("causal-norefresh", 1.0), ("bidirectional-refresh", 1.755)])
def test_a_step_costs_what_its_streams_cost(kind, ratio):
    model, vanilla = ModelConfig(), CycleConfig(variant="vanilla")
    cost = training_flops_per_token(schedule_of(model, CycleConfig(variant=kind)), document_length=4096)
    assert cost / training_flops_per_token(schedule_of(model, vanilla), document_length=4096) == pytest.approx(ratio, abs=0.1)


def test_a_published_figure():
    """Qwen3-4B at 4,096 tokens: 27.8 GFLOP a token, half of the square of attention counted."""
    schedule = schedule_of(ModelConfig(), CycleConfig(variant="vanilla"))
    assert training_flops_per_token(schedule, document_length=4096) == pytest.approx(27.8e9, rel=0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_visits_and_head_add_up_to_the_step(kind):
    schedule = make_schedule(decoder(), method(kind))
    visits = sum(visit_flops(schedule, visit, document_lengths=[8, 16]) for visit in schedule.visits)
    assert visits + head_flops(schedule, num_tokens=24) == training_flops(schedule, document_lengths=[8, 16])


def test_a_layer_that_is_visited_twice_costs_twice_and_has_its_parameters_once():
    once = make_schedule(decoder(), ORDINARY)
    again = dataclasses.replace(once.visits[2], kv_place=4)
    group = dataclasses.replace(once.kv_groups[0], visits=(0, 1, 2, 3, 4), num_places=5)
    assert isinstance(group, KVGroup)
    twice = Schedule(decoder=once.decoder, method=ORDINARY, visits=(*once.visits, again), kv_groups=(group,))
    assert training_flops(twice, document_lengths=[8]) - training_flops(once, document_lengths=[8]) == visit_flops(
        once, once.visits[2], document_lengths=[8]
    )
    assert num_parameters(twice.decoder) == num_parameters(once.decoder)


def test_decoding_reads_the_parallel_layers_once_per_cycle():
    model = ModelConfig()
    vanilla = decoding_weights(schedule_of(model, CycleConfig(variant="vanilla")))
    for variant in VARIANTS:
        cycled = decoding_weights(schedule_of(model, CycleConfig(variant=variant)))
        assert vanilla / cycled == pytest.approx(2.11, abs=0.01)
