from typing import Any

import pytest

from megatron_dmtd.architecture import RopeScaling
from megatron_dmtd.config import Config, data_parallel_size, num_microbatches, validate
from megatron_dmtd.errors import ConfigError
from tests.support.tiny import VARIANTS, tiny_config, with_settings

BAD: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"model": {"num_layers": 0}}, "model.num_layers = 0"),
    ({"model": {"num_key_value_heads": 3}}, "4 query heads over 3 key-value heads"),
    ({"model": {"head_dim": 7}}, "model.head_dim = 7"),
    ({"model": {"sliding_window": -1}}, "model.sliding_window = -1"),
    ({"model": {"windowed_layers": (1,)}}, "model.windowed_layers = [1] with model.sliding_window = 0"),
    ({"model": {"sliding_window": 8, "windowed_layers": (1, 4)}}, "model.windowed_layers = [1, 4] of 4 layers"),
    ({"model": {"sliding_window": 8, "windowed_layers": (1, 1)}}, "model.windowed_layers = [1, 1] of 4 layers"),
    ({"model": {"sliding_window": 8, "windowed_layers": (1, 3)}}, ""),
    ({"model": {"rope_scaling": RopeScaling(factor=2.0)}}, "model.rope_scaling with rope_type default"),
    ({"model": {"rope_scaling": RopeScaling(rope_type="linear", factor=0.5)}}, "model.rope_scaling.factor = 0.5"),
    ({"model": {"rope_scaling": RopeScaling(rope_type="yarn", factor=2.0)}}, "original_max_position_embeddings = 0"),
    (
        {
            "model": {
                "rope_scaling": RopeScaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=64, beta_fast=0.5)
            }
        },
        "model.rope_scaling.beta_fast = 0.5, beta_slow = 1.0",
    ),
    (
        {
            "model": {
                "rope_scaling": RopeScaling(
                    rope_type="llama3", factor=2.0, original_max_position_embeddings=64, low_freq_factor=4.0
                )
            }
        },
        "model.rope_scaling.low_freq_factor = 4.0, high_freq_factor = 4.0",
    ),
    ({"model": {"rope_scaling": RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)}}, ""),
    ({"cycle": {"cycle_length": 0}}, "cycle.cycle_length = 0"),
    ({"cycle": {"num_parallel_layers": 4}}, "4 parallel layers of 4 layers"),
    ({"cycle": {"num_parallel_layers": 0}}, "0 parallel layers of 4 layers"),
    ({"cycle": {"mask_token_id": 100}}, "cycle.mask_token_id = 100"),
    ({"cycle": {"mask_token_id": -1}}, "cycle.mask_token_id = -1"),
    ({"cycle": {"variant": "sideways"}}, "cycle.variant = 'sideways'"),
    ({"parallel": {"tensor": 0}}, "parallel.tensor = 0"),
    ({"parallel": {"tensor": 3}}, "model.num_attention_heads = 4 over parallel.tensor = 3"),
    ({"parallel": {"tensor": 4}}, "model.num_key_value_heads = 2 over parallel.tensor = 4"),
    ({"parallel": {"tensor": 2}, "model": {"intermediate_size": 49}}, "model.intermediate_size = 49"),
    ({"parallel": {"context": 2}}, "parallel.context = 2"),
    ({"parallel": {"virtual_stages": 2}}, "parallel.virtual_stages = 2 with parallel.pipeline = 1"),
    ({"parallel": {"pipeline": 2, "virtual_stages": 3}}, "6 pipeline stages for 4 layers"),
    ({"parallel": {"pipeline": 2, "virtual_stages": 2, "stage_layers": (2, 2)}}, "parallel.pipeline is 2 with 2 virtual stages"),
    ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel with parallel.tensor = 1"),
    ({"parallel": {"overlap_param_gather": True}}, "overlap_param_gather without both"),
    ({"parallel": {"pipeline": 5}}, "5 pipeline stages for 4 layers"),
    ({"model": {"normalized": True}}, "model.normalized = True with model.tie_word_embeddings = True"),
    ({"model": {"second_rope_theta": 1e6}}, "model.second_rope_theta = 1000000.0 with model.second_rope_layers = []"),
    ({"model": {"second_rope_theta": 1e6, "second_rope_layers": (4,)}}, "model.second_rope_layers = [4] of 4 layers"),
    ({"model": {"num_loops": 2}}, "model.num_loops = 2 with model.num_recurrent_layers = 0"),
    ({"model": {"num_input_layers": 2, "num_recurrent_layers": 3, "injection": "add"}}, "2 input and 3 recurrent layers of 4"),
    ({"model": {"num_recurrent_layers": 1}}, "model.injection = residual with model.normalized = False"),
    ({"model": {"num_input_layers": 1, "num_recurrent_layers": 2, "injection": "add"}}, "inside the loop of layers 1 to 2"),
    (
        {"model": {"num_recurrent_layers": 2, "injection": "add"}, "parallel": {"pipeline": 4}},
        "4 pipeline stages for 4 layers, 2 of them in a loop",
    ),
    (
        {"model": {"num_recurrent_layers": 2, "injection": "add"}, "parallel": {"pipeline": 2, "stage_layers": (1, 3)}},
        "stages end after layers [1, 4]",
    ),
    (
        {
            "model": {"num_recurrent_layers": 2, "injection": "add"},
            "parallel": {"overlap_grad_reduce": True, "recompute": "full"},
        },
        "parallel.overlap_grad_reduce with parallel.recompute = full in a model with a loop",
    ),
    ({"parallel": {"pipeline": 2, "stage_layers": (4,)}}, "lists 1 stages (4), parallel.pipeline is 2"),
    ({"parallel": {"pipeline": 2, "stage_layers": (4, 0)}}, "parallel.stage_layers = [4, 0]"),
    ({"parallel": {"pipeline": 2, "stage_layers": (2, 1)}}, "parallel.stage_layers = 2 + 1 = 3 layers"),
    ({"parallel": {"pipeline": 2, "stage_layers": (3, 1)}}, "stages end after layers [3, 4]"),
    ({"data": {"seq_length": 30}}, "data.seq_length = 30 with cycle.cycle_length = 4"),
    ({"data": {"seq_length": 256}}, "data.seq_length = 256, model.max_position_embeddings = 128"),
    ({"data": {"pad_token_id": 100}}, "data.pad_token_id = 100"),
    ({"data": {"seq_length": 12}, "parallel": {"tensor": 2, "sequence_parallel": True}, "cycle": {"cycle_length": 3}}, ""),
    (
        {"data": {"seq_length": 9}, "parallel": {"tensor": 2, "sequence_parallel": True}, "cycle": {"cycle_length": 3}},
        "over 2 ranks",
    ),
    ({"optimizer": {"lr": 0.0}}, "optimizer.lr = 0.0"),
    ({"optimizer": {"min_lr": 1.0}}, "optimizer.min_lr = 1.0 above"),
    ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2 = 1.0"),
    ({"optimizer": {"warmup_steps": 6}}, "6 warm-up steps, decay that ends at step 6"),
    ({"optimizer": {"decay": "WSD"}}, "optimizer.decay = WSD with optimizer.wsd_decay_steps = 0"),
    ({"optimizer": {"clip_grad": -1.0}}, "optimizer.clip_grad = -1.0"),
    ({"training": {"micro_batch_size": 0}}, "training.micro_batch_size = 0"),
    ({"training": {"eval_interval": -1}}, "training.eval_interval = -1"),
    ({"training": {"rampup_batch_size": (2, 2)}}, "training.rampup_batch_size = [2, 2]"),
    ({"training": {"rampup_batch_size": (2, 0, 8)}}, "training.rampup_batch_size = [2, 0, 8]"),
    ({"training": {"rampup_batch_size": (4, 2, 8)}}, "[4, 2, 8] with training.global_batch_size = 4"),
    ({"training": {"rampup_batch_size": (1, 2, 8)}}, "[1, 2, 8] with training.global_batch_size = 4"),
    ({"training": {"rampup_batch_size": (2, 1, 8)}}, ""),
    ({"logging": {"interval": 0}}, "logging.interval = 0"),
    ({"logging": {"peak_tflops": -1.0}}, "logging.peak_tflops = -1.0"),
    ({"logging": {"peak_tflops": 1.0, "measure_peak": True}}, "logging.measure_peak with logging.peak_tflops = 1.0"),
]


@pytest.mark.parametrize(("sections", "found"), BAD, ids=[found or f"it fits {index}" for index, (_, found) in enumerate(BAD)])
def test_a_contradiction_is_refused_by_name(sections: dict[str, dict[str, Any]], found: str) -> None:
    config = tiny_config(**sections)
    if not found:
        validate(config)
        return
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert found in caught.value.found
    assert caught.value.required
    assert caught.value.remedy


@pytest.mark.parametrize("variant", [*VARIANTS, "vanilla"])
def test_the_defaults_and_the_tiny_model_are_valid(variant: str) -> None:
    validate(Config())
    validate(tiny_config(variant), world_size=4)


def test_a_vanilla_model_needs_no_split_and_no_mask() -> None:
    validate(tiny_config("vanilla", cycle={"num_parallel_layers": 99, "mask_token_id": 10**6}))
    validate(tiny_config("vanilla", parallel={"pipeline": 2, "stage_layers": (3, 1)}))


def test_processes_must_fit_the_layout_and_rows_the_processes() -> None:
    config = tiny_config(parallel={"tensor": 2, "pipeline": 2})
    assert data_parallel_size(config, 8) == 2
    assert num_microbatches(config, 8) == 2
    for world_size in (0, 1, 6):
        with pytest.raises(ConfigError, match=f"{world_size} processes for tensor 2 x pipeline 2 = 4 ranks"):
            validate(config, world_size=world_size)
    with pytest.raises(ConfigError, match="global_batch_size = 4 rows, micro_batch_size 1 x 3 data-parallel ranks = 3"):
        validate(tiny_config(), world_size=3)
    interleaved = with_settings(config, parallel={"tensor": 1, "virtual_stages": 2}, training={"global_batch_size": 3})
    with pytest.raises(ConfigError, match="3 microbatches per step for 2 interleaved pipeline ranks"):
        validate(interleaved, world_size=2)
    ramp = with_settings(tiny_config(), training={"global_batch_size": 8, "rampup_batch_size": (2, 2, 8)})
    validate(ramp, world_size=2)
    with pytest.raises(
        ConfigError, match=r"steps of 2 rows from .*rampup_batch_size = \[2, 2, 8\], .* x 4 data-parallel ranks = 4"
    ):
        validate(ramp, world_size=4)
    odd = with_settings(ramp, parallel={"pipeline": 2, "virtual_stages": 2}, training={"rampup_batch_size": (5, 3, 8)})
    with pytest.raises(ConfigError, match=r"5 microbatches per step for 2 interleaved pipeline ranks(?s:.*)START and INCREMENT"):
        validate(odd, world_size=2)
    with pytest.raises(ConfigError, match="a multiple of 8"):
        validate(with_settings(tiny_config(), training={"micro_batch_size": 8}), world_size=1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": "best-fit", "prefetch_batches": 0, "shuffle_seed": 0},
        {"train": ("a", "b"), "train_weights": (0.001, 0.999)},
        {"train": ("a", "b")},
    ],
)
def test_sound_settings_of_data_pass(settings):
    validate(tiny_config(data=settings))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"shuffle_seed": -1}, r"data\.shuffle_seed = -1"),
        ({"prefetch_batches": -1}, r"data\.prefetch_batches = -1"),
        ({"train": ("a", "b"), "train_weights": (1.0,)}, r"1 data\.train_weights for 2 corpora"),
        ({"train": ("a", "b"), "train_weights": (1.0, 0.0)}, r"data\.train_weights = \[1\.0, 0\.0\]"),
        ({"train": ("a",), "train_weights": (float("nan"),)}, r"data\.train_weights = \[nan\]"),
        ({"train": ("a",), "train_weights": (float("inf"),)}, r"data\.train_weights = \[inf\]"),
    ],
)
def test_settings_of_data_that_cannot_work_are_refused_by_name(settings, found):
    with pytest.raises(ConfigError, match=found):
        validate(tiny_config(data=settings))
