"""A plan says what the run then is: exact counts, and an estimate of activations that autograd confirms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.architecture.activations import visit_activations_per_token
from megatron_dmtd.architecture.flops import training_flops
from megatron_dmtd.architecture.tensors import num_parameters
from megatron_dmtd.config import Config, CycleConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_dmtd.config.decoder import decoder_of, schedule_of
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.parallel.placement import place
from megatron_dmtd.training.plan import _stage_parameters, describe, make_plan, require_memory, to_dict
from tests.support.ranks import run_ranks
from tests.support.tiny import VARIANTS, tiny_config, with_settings

BIASES = {"tie_word_embeddings": False, "qk_norm": False, "qkv_bias": True, "output_bias": True}


def test_qwen3_4b_has_its_published_number_of_parameters() -> None:
    assert make_plan(Config(), world_size=1).num_parameters == 4_022_468_096


@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "virtual_stages": 2}, {"tensor": 2}])
@pytest.mark.parametrize("variant", [*VARIANTS, "vanilla"])
def test_flops_of_the_stages_add_up_to_those_of_the_model(variant: str, parallel: dict[str, Any]) -> None:
    config = tiny_config(variant, parallel=parallel)
    plan = make_plan(config, world_size=config.parallel.tensor * config.parallel.pipeline)
    rows = [config.data.seq_length] * config.training.global_batch_size
    flops = training_flops(schedule_of(config.model, config.cycle), document_lengths=rows)
    assert plan.step_flops == pytest.approx(flops, rel=1e-12)
    assert all(stage.step_flops > 0 for stage in plan.stages)


def rank_parameters(config: Config) -> list[int]:
    """Parameters of each of this rank's stages."""
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.setup import build_models

    platform = prepare_megatron()
    init_parallel(config, platform)
    return [sum(parameter.numel() for parameter in model.parameters()) for model in build_models(config, platform)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("model", [{}, {"tie_word_embeddings": False}, BIASES], ids=["tied", "untied", "biases"])
@pytest.mark.parametrize(
    "parallel",
    [{}, {"pipeline": 2}, {"pipeline": 3, "stage_layers": (2, 1, 1)}, {"pipeline": 2, "virtual_stages": 2}, {"tensor": 2}],
    ids=["one", "pipeline-2", "pipeline-3", "virtual", "tensor-2"],
)
def test_parameters_of_each_rank_are_those_of_its_model(parallel: dict[str, Any], model: dict[str, Any]) -> None:
    config = tiny_config(parallel=parallel, model=model)
    world_size = config.parallel.tensor * config.parallel.pipeline
    plan = make_plan(config, world_size=world_size)
    found = run_ranks(world_size, rank_parameters, config)
    for rank, counts in enumerate(found):
        pipeline_rank = rank // config.parallel.tensor
        assert counts == [stage.num_parameters for stage in plan.stages if stage.stage.rank == pipeline_rank]


def kept_per_token(config: Config, grown: str) -> float:
    """Bytes that the backward pass keeps for two more layers, per token: what autograd saves, each storage once."""
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.setup import build_models

    platform = prepare_megatron()
    init_parallel(config, platform)
    kept, held = [], []  # what is held gives its address to nothing else
    for num_layers in (4, 6):
        num_parallel = num_layers - 2 if grown == "parallel" else 2
        larger = with_settings(config, model={"num_layers": num_layers}, cycle={"num_parallel_layers": num_parallel})
        (model,) = build_models(larger, platform)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, int] = {}

        def save(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            held.append(tensor)
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens, positions = torch.zeros(1, 128, dtype=torch.long), torch.arange(128)[None]
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = model(tokens, positions, tokens, document_lengths=((128,),))
        kept.append(sum(size for pointer, size in storages.items() if pointer not in parameters))
        del loss
    return (kept[1] - kept[0]) / 2 / 128


@pytest.mark.multiprocess
@pytest.mark.parametrize(("grown", "streams"), [("sequential", 1), ("parallel", 2)])
@pytest.mark.parametrize(
    "parts", [{}, {"qk_norm": False}, {"sliding_window": 16}, BIASES], ids=["qwen3", "llama", "window", "biases"]
)
def test_the_estimate_of_activations_is_close_to_what_autograd_keeps(parts: dict[str, Any], grown: str, streams: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "max_position_embeddings": 128}
    config = tiny_config(model=sizes | parts, data={"seq_length": 128})
    measured = run_ranks(1, kept_per_token, config, grown)[0]
    schedule = schedule_of(config.model, config.cycle)
    visit = schedule.visits[0 if grown == "parallel" else -1]
    assert len(visit.streams) == streams
    estimate = visit_activations_per_token(schedule, visit, on_gpu=False)
    assert 4 * streams * estimate == pytest.approx(measured, rel=0.02)
    assert visit_activations_per_token(schedule, visit, on_gpu=True) < estimate


def test_microbatches_in_flight_and_bubble_follow_the_schedule() -> None:
    plan = make_plan(tiny_config(parallel={"pipeline": 4}, training={"global_batch_size": 8}), world_size=4)
    assert [stage.microbatches_in_flight for stage in plan.stages] == [4, 3, 2, 1]
    assert plan.bubble == pytest.approx(3 / 11)
    assert [stage.streams_in for stage in plan.stages] == [2, 2, 1, 1]
    one_stream = 32 * 32 * 4
    assert [stage.sends_bytes for stage in plan.stages] == [2 * one_stream, one_stream, one_stream, 0]
    interleaved = make_plan(
        tiny_config(parallel={"pipeline": 2, "virtual_stages": 2}, training={"global_batch_size": 8}), world_size=2
    )
    assert interleaved.bubble == pytest.approx(1 / 17)


def test_optimizer_state_is_shared_by_data_parallel_ranks_and_bf16_adds_masters() -> None:
    one = make_plan(tiny_config(), world_size=1).stages[0]
    four = make_plan(tiny_config(), world_size=4).stages[0]
    assert one.optimizer_bytes == 8 * one.num_parameters
    assert four.optimizer_bytes == 2 * one.num_parameters
    bf16 = make_plan(tiny_config(training={"precision": "bf16"}), world_size=1).stages[0]
    assert (bf16.weight_bytes, bf16.optimizer_bytes) == (2 * one.num_parameters, 12 * one.num_parameters)
    whole = make_plan(tiny_config(parallel={"distributed_optimizer": False}), world_size=4).stages[0]
    assert whole.optimizer_bytes == one.optimizer_bytes


def test_what_does_not_fit_or_divide_is_refused() -> None:
    config = Config(parallel=ParallelConfig(pipeline=4), training=TrainingConfig(global_batch_size=256))
    with pytest.raises(ConfigError, match="on pipeline rank 0"):
        require_memory(make_plan(config, world_size=32), device_gib=10)
    require_memory(make_plan(config, world_size=32), device_gib=1000)
    with pytest.raises(ConfigError, match="6 processes"):
        make_plan(config, world_size=6)


def test_a_growing_batch_is_told_with_its_steps_and_tokens() -> None:
    training = {"global_batch_size": 8, "rampup_batch_size": (2, 2, 12), "steps": 10}
    plan = make_plan(tiny_config(training=training), world_size=1)
    assert plan.batch_sizes == ((2, 2), (4, 1), (6, 1), (8, 6))  # rows 0, 2; 4; 8; from 14 on
    assert plan.run_tokens == (4 + 4 + 6 + 48) * 32
    assert "10 steps, 1,984 tokens: 2 of 2 rows, 1 of 4 rows, 1 of 6 rows, 6 of 8 rows\n" in describe(plan)
    assert to_dict(plan)["run_tokens"] == 1984
    cut = make_plan(tiny_config(training=training | {"steps": 3}, optimizer={"warmup_steps": 1}), world_size=1)
    assert "3 steps, 256 tokens: 2 of 2 rows, 1 of 4 rows; it ends before a step has 8 rows" in describe(cut)
    assert "6 steps, 768 tokens\n" in describe(make_plan(tiny_config(), world_size=1))


def test_recompute_keeps_less() -> None:
    kept = {
        recompute: make_plan(tiny_config(parallel={"recompute": recompute}), world_size=1).stages[0].activation_bytes
        for recompute in ("none", "full")
    }
    assert kept["full"] < kept["none"]


def test_the_description_names_every_stage_and_what_it_holds() -> None:
    config = Config(
        model=ModelConfig(), cycle=CycleConfig(), parallel=ParallelConfig(pipeline=3), training=TrainingConfig(precision="bf16")
    )
    plan = make_plan(config, world_size=3)
    text = describe(plan)
    for expected in ("4,022.5 M parameters", "28-35", "embeds", "adds Embed(x), head and loss", "pipeline bubble"):
        assert expected in text
    assert [stage["num_layers"] for stage in to_dict(plan)["stages"]] == [14, 14, 8]  # type: ignore[index,attr-defined]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalized": True, "tie_word_embeddings": False, "num_recurrent_layers": 2, "num_loops": 2},
        {"num_recurrent_layers": 2, "num_loops": 2, "injection": "concat_linear"},
        {"num_recurrent_layers": 2, "num_loops": 2, "injection": "add", "tie_word_embeddings": False},
    ],
    ids=["normalized", "linear injection", "sum"],
)
def test_parameters_of_looped_decoders_are_those_of_their_tensors(changes):
    config = tiny_config("vanilla", model={"vocab_size": 128, **changes})  # a vocabulary that needs no padding
    (stage,) = place(config).stages
    assert _stage_parameters(config, place(config), stage) == num_parameters(decoder_of(config.model))
