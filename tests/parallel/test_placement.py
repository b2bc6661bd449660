import itertools

import pytest

from megatron_dmtd.architecture.flops import matrix_weights
from megatron_dmtd.config import Config, CycleConfig, ModelConfig, ParallelConfig
from megatron_dmtd.config.decoder import schedule_of
from megatron_dmtd.parallel.placement import head_cost, place, stage_visits, visit_cost
from tests.support.tiny import VARIANTS, tiny_config


def _qwen3_4b(pipeline: int, variant: str = "bidirectional-refresh") -> Config:
    return Config(parallel=ParallelConfig(pipeline=pipeline), cycle=CycleConfig(variant=variant))  # type: ignore[arg-type]


def _stages(config: Config) -> tuple[int, ...]:
    return tuple(len(stage.visits) for stage in place(config).stages)


def _costs_in_layers(cycle: CycleConfig) -> list[float]:
    schedule = schedule_of(ModelConfig(num_layers=3), cycle)
    layer = matrix_weights(schedule.decoder.layers[0], schedule.decoder.hidden_size)
    return [visit_cost(schedule, visit) / layer for visit in schedule.visits]


def test_the_tied_head_of_qwen3_4b_weighs_3_85_layers() -> None:
    schedule = schedule_of(ModelConfig(), CycleConfig(variant="vanilla"))
    assert head_cost(schedule) / visit_cost(schedule, schedule.visits[0]) == pytest.approx(3.85, abs=0.01)


def test_a_refresh_model_pays_twice_for_its_parallel_layers_only() -> None:
    assert _costs_in_layers(CycleConfig(num_parallel_layers=2)) == [2.0, 2.0, 1.0]
    for variant in ("vanilla", "causal-norefresh", "bidirectional-norefresh"):
        assert _costs_in_layers(CycleConfig(variant=variant, num_parallel_layers=2)) == [1.0] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pipeline", range(2, 37))
def test_every_number_of_stages_keeps_all_layers_and_the_split(pipeline: int, variant: str) -> None:
    placement = place(_qwen3_4b(pipeline, variant))
    assert [layer for stage in placement.stages for layer in stage.layers] == list(range(36))
    assert [stage.first_layer for stage in placement.stages if stage.has_split] == [28]
    assert placement.stages[0].has_input_embedding
    assert placement.stages[-1].has_output


def test_stages_are_balanced_by_cost() -> None:
    assert _stages(_qwen3_4b(2)) == (28, 8)
    assert _stages(_qwen3_4b(4)) == (9, 9, 10, 8)
    assert sum(_stages(_qwen3_4b(2, "vanilla"))) == 36
    assert _stages(_qwen3_4b(2, "vanilla"))[1] in (16, 17)  # the head counts as about four layers


def test_no_other_split_has_a_lighter_heaviest_stage() -> None:
    config = tiny_config(model={"num_layers": 7, "vocab_size": 400}, cycle={"num_parallel_layers": 4}, parallel={"pipeline": 4})
    schedule = schedule_of(config.model, config.cycle)
    costs = [visit_cost(schedule, visit) for visit in schedule.visits]
    costs[-1] += head_cost(schedule)

    def heaviest(ends: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, 7)))

    best = min(heaviest(ends) for ends in itertools.combinations(range(1, 7), 3) if 4 in ends)
    counts = stage_visits(schedule, num_stages=4)
    assert heaviest(tuple(itertools.accumulate(counts))[:-1]) == best


@pytest.mark.parametrize(
    ("stages", "tied", "copies"),
    [
        ((4,), True, (0,)),
        ((2, 2), True, (0, 1)),  # the head's copy serves the split
        ((2, 2), False, (0, 1)),
        ((1, 1, 2), True, (0, 2)),
        ((2, 1, 1), True, (0, 1, 2)),
        ((2, 1, 1), False, (0, 1)),
    ],
)
def test_copies_of_the_embedding_table_are_where_it_is_read(stages: tuple[int, ...], tied: bool, copies: tuple[int, ...]) -> None:
    config = tiny_config(model={"tie_word_embeddings": tied}, parallel={"pipeline": len(stages), "stage_layers": stages})
    assert place(config).table_stages == copies


def test_a_vanilla_model_has_no_split() -> None:
    placement = place(tiny_config("vanilla", model={"tie_word_embeddings": False}, parallel={"pipeline": 2}))
    assert not any(stage.has_split for stage in placement.stages)
    assert placement.table_stages == (0,)


LOOPED = {"num_layers": 8, "num_input_layers": 2, "num_recurrent_layers": 3, "num_loops": 4, "injection": "add"}


@pytest.mark.parametrize("pipeline", range(1, 7))
def test_a_loop_is_never_cut_and_costs_as_much_as_its_visits(pipeline: int) -> None:
    placement = place(tiny_config(model=LOOPED, cycle={"variant": "vanilla"}, parallel={"pipeline": pipeline}))
    assert [layer for stage in placement.stages for layer in stage.layers] == list(range(8))
    assert [len(stage.visits) for stage in placement.stages if {2, 3, 4} <= set(stage.layers)] == [
        12 + sum(layer not in (2, 3, 4) for stage in placement.stages for layer in stage.layers if {2, 3, 4} <= set(stage.layers))
    ]
    if pipeline == 3:  # 2, 12 and 3 visits: the loop stands alone
        assert [stage.layers for stage in placement.stages] == [(0, 1), (2, 3, 4), (5, 6, 7)]


def test_configured_stages_are_counted_in_layers() -> None:
    config = tiny_config(model=LOOPED, cycle={"variant": "vanilla"}, parallel={"pipeline": 2, "stage_layers": (6, 2)})
    assert _stages(config) == (2 + 12 + 1, 2)


def test_a_loop_may_lie_in_the_parallel_pass() -> None:
    config = tiny_config(model=LOOPED, cycle={"num_parallel_layers": 6}, parallel={"pipeline": 3})
    placement = place(config)
    assert [stage.layers for stage in placement.stages] == [(0, 1), (2, 3, 4, 5), (6, 7)] or [
        stage.layers for stage in placement.stages
    ] == [(0, 1, 2, 3, 4), (5,), (6, 7)]
    assert [stage.has_split for stage in placement.stages] == [False, False, True]
