"""Dory's two dialects, read and written."""

import json

import pytest

from megatron_dmtd.architecture import num_parameters
from megatron_dmtd.config import CycleConfig
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.errors import ModelError
from megatron_dmtd.families import ModelDescription, hf_tensors, read_fields, write_fields
from megatron_dmtd.families.dory import Dory
from tests.families.dory_directories import COMMON, CURRENT, DIALECTS, OLDER, tensors

#: what only one dialect has; the rest is common
WRITTEN_TO = {"current": CURRENT, "older": OLDER}


def without(fields: dict, *names: str) -> dict:
    return {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_and_both_describe_the_same_decoder(dialect):
    model = read_fields(DIALECTS[dialect]).model
    assert model == read_fields(DIALECTS["both"]).model
    assert (model.num_layers, model.num_input_layers, model.num_recurrent_layers, model.num_loops) == (4, 1, 2, 3)
    assert (model.sliding_window, model.windowed_layers, model.head_dim, model.init_std) == (6, (0, 2), 16, 0.03)
    assert (model.rope_theta, model.second_rope_theta, model.second_rope_layers) == (1e4, 5e5, (1, 3))
    assert model.normalized and model.step_init == 0.3 and model.attention_gate_init == 0.0 and model.injection == "residual"


def test_the_tensors_are_those_of_the_published_layout():
    expected = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    found = hf_tensors(read_fields(DIALECTS["both"]).decoder)
    assert {name: shape.shape for name, shape in found.items()} == expected


def test_the_published_shape_has_3_975_229_440_parameters():
    published = {
        "model_type": "dory",
        "num_hidden_layers": 72,
        "dory_format_version": 1,
        "n_input_layers": 16,
        "n_output_layers": 16,
    }
    model = read_fields(published | {"n_recurrent_layers": 40, "n_recurrent_loops": 4}).model
    assert num_parameters(decoder_of(model)) == 3_975_229_440
    assert (model.num_layers, model.hidden_size, model.windowed_layers[:4], model.num_recurrent_layers) == (
        36,
        2560,
        (0, 1, 2, 4),
        20,
    )


@pytest.mark.parametrize("dialect", WRITTEN_TO)
def test_what_is_written_is_complete_in_each_dialect_by_itself(dialect):
    description = read_fields(DIALECTS["both"])
    written = json.loads(json.dumps(write_fields(description)))
    other = WRITTEN_TO["older" if dialect == "current" else "current"]
    assert read_fields(without(written, *other, "swa_num_attention_heads", "swa_num_key_value_heads")).model == description.model
    assert set(DIALECTS["both"]) <= set(written)
    for name, value in (COMMON | CURRENT | without(OLDER, "swa_head_dim")).items():
        assert written[name] == value, name
    assert written["swa_head_dim"] == 16


def test_blocks_as_transformers_has_them_in_memory():
    blocks = COMMON | CURRENT | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
    }  # fmt: skip
    assert read_fields(blocks).model == read_fields(DIALECTS["both"]).model
    assert read_fields(
        DIALECTS["older"] | blocks | {"num_hidden_layers": 8, **COMMON, "layer_types": CURRENT["layer_types"]}
    ).model


def test_values_that_every_reader_assumes_may_be_left_out():
    model = read_fields(
        without(DIALECTS["current"], "sliding_window", "head_dim", "ngpt_alpha_init", "recurrent_kv_cache_mode")
    ).model
    assert (model.sliding_window, model.head_dim, model.step_init, model.recurrent_kv_cache_mode) == (1024, 256, 0.05, "per_loop")
    older = read_fields(
        without(DIALECTS["older"], "init_method_std", "rope_theta_2", "rope_profile_layers", "no_rope_layers")
    ).model
    assert older.init_std == 0.02 and older.second_rope_layers == ()


@pytest.mark.parametrize(
    "name",
    ["initializer_range", "rope_parameters", "n_recurrent_loops", "n_input_layers", "n_recurrent_layers", "n_output_layers"],
)
def test_values_for_which_readers_assume_different_ones_must_be_stated(name):
    with pytest.raises(ModelError, match=f"no {name}"):
        read_fields(without(DIALECTS["current"], name))


REFUSED = {
    "groups": ({"n_input_layers": 4}, "4 input, 4 recurrent and 2 output layers of 8"),
    "groups of halves": ({"n_input_layers": 1, "n_recurrent_layers": 5}, "part an attention from its mlp"),
    "no loop": ({"n_recurrent_loops": 0}, "n_recurrent_loops 0"),
    "half a loop": ({"n_recurrent_loops": 1.5}, "n_recurrent_loops 1.5, which is not an integer"),
    "mode": ({"recurrent_kv_cache_mode": "every_loop"}, "recurrent_kv_cache_mode 'every_loop'"),
    "bias": ({"attention_bias": True}, "attention_bias true"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias true"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
    "step": ({"ngpt_alpha_init": 0.0}, "ngpt_alpha_init 0.0"),
    "gate": ({"attention_output_gate_logit_scale_init": -1.0}, "attention_output_gate_logit_scale_init -1.0"),
    "eps": ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
    "unknown": ({"n_experts": 8}, "n_experts 8"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
}
REFUSED_CURRENT = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "deviation": ({"initializer_range": 0}, "initializer_range 0"),
    "negative deviation": ({"initializer_range": -0.02}, "initializer_range -0.02"),
    "no window": ({"sliding_window": None}, "sliding_attention with a sliding_window of null"),
    "window of nothing": ({"sliding_window": 0}, "sliding_attention with a sliding_window of 0"),
    "too few types": ({"layer_types": ["full_attention", "mlp"]}, "2 layer_types for 8 layers"),
    "unknown type": ({"layer_types": ["chunked_attention", "mlp"] * 4}, "layer_types with chunked_attention"),
    "two attentions": ({"layer_types": ["full_attention"] * 2 + ["mlp"] * 2 + list(CURRENT["layer_types"][4:])}, "take turns"),
    "no base": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "no rope_parameters.sliding_attention"),
    "scaled": (
        {"rope_parameters": {kind: {"rope_type": "yarn", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
        "rope_parameters.sliding_attention.rope_type 'yarn'",
    ),
    "base of nothing": (
        {"rope_parameters": {kind: {"rope_theta": 0} for kind in ("full_attention", "sliding_attention")}},
        "rope_parameters.sliding_attention.rope_theta 0.0",
    ),
    "half rotated": (
        {"rope_parameters": {kind: {"rope_theta": 1.0, "partial_rotary_factor": 0.5} for kind in CURRENT["rope_parameters"]}},
        "rope_parameters.sliding_attention.partial_rotary_factor 0.5",
    ),
}
REFUSED_OLDER = {
    "version": ({"dory_format_version": 2}, "dory_format_version 2"),
    "activation": ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act 'gelu'"),
    "letter": ({"hybrid_layer_pattern": "S-*-S-M-"}, "hybrid_layer_pattern with 'M'"),
    "length": ({"hybrid_layer_pattern": "S-*-"}, "hybrid_layer_pattern of 4 letters for 8 layers"),
    "profiles": ({"rope_profile_layers": [1] * 7}, "rope_profile_layers of 7 numbers for 8 layers"),
    "third profile": ({"rope_profile_layers": [1] * 7 + [3]}, "rope_profile_layers with 3"),
    "profile 0": ({"rope_profile_layers": [0] * 8}, "rope_profile_layers with 0"),
    "no rotation": ({"no_rope_layers": [0] * 7 + [1]}, "no_rope_layers with 1"),
    "rotations": ({"no_rope_layers": [0]}, "no_rope_layers of 1 numbers for 8 layers"),
    "width of windows": ({"swa_head_dim": 8}, "swa_head_dim 8 with 16 in layers without a window"),
    "heads of windows": ({"swa_num_attention_heads": 8}, "swa_num_attention_heads 8 with 4"),
    "no window": ({"swa_window_size": None}, "sliding_attention with a sliding_window of null"),
    "partly rotated": ({"partial_rotary_factor": 0}, "partial_rotary_factor 0"),
    "partly rotated elsewhere": ({"partial_rotary_factor_2": 0.5}, "partial_rotary_factor_2 0.5"),
    "ngpt": ({"ngpt": False}, "ngpt false"),
    "gate": ({"attention_output_gate": False}, "attention_output_gate false"),
    "final norm": ({"ngpt_enable_final_norm": True}, "ngpt_enable_final_norm true"),
    "state": ({"initial_state": "zero"}, "initial_state 'zero'"),
    "input": ({"input_transform": "concat"}, "input_transform 'concat'"),
    "output": ({"output_transform": "gated"}, "output_transform 'gated'"),
    "slerp": ({"output_transform": "adaptive_slerp"}, "output_transform 'adaptive_slerp'"),
    "mixer": ({"mixer_type": "mamba"}, "mixer_type 'mamba'"),
    "deviation": ({"init_method_std": 0.0}, "init_method_std 0.0"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(dialect, case):
    changes, said = REFUSED[case]
    with pytest.raises(ModelError, match=said):
        read_fields(DIALECTS[dialect] | changes)


@pytest.mark.parametrize(
    ("dialect", "changes", "said"),
    [("current", *one) for one in REFUSED_CURRENT.values()] + [("older", *one) for one in REFUSED_OLDER.values()],
)
def test_what_one_dialect_says_and_nobody_computes_is_refused_by_name(dialect, changes, said):
    for fields in (DIALECTS[dialect], DIALECTS["both"]):
        with pytest.raises(ModelError, match=said):
            read_fields(fields | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 8}, "head_dim and attention_head_dim"),
        ({"sliding_window": 7}, "sliding_window and swa_window_size"),
        ({"initializer_range": 0.02}, "initializer_range and init_method_std"),
        ({"hybrid_layer_pattern": "*-S-S-*-"}, "layer_types and hybrid_layer_pattern"),
        ({"rope_theta_2": 1e6}, "rope_parameters and rope_theta and rope_profile_layers"),
    ],
)
def test_dialects_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(ModelError, match=f"{said}, which contradict each other"):
        read_fields(DIALECTS["both"] | changes)


def test_two_bases_among_layers_of_one_kind_can_be_read_and_not_written():
    description = read_fields(DIALECTS["older"] | {"rope_profile_layers": [2, 2, 2, 2, 1, 1, 2, 2]})
    with pytest.raises(ModelError, match="two rotary bases among layers of one kind"):
        write_fields(description)


def test_other_families_say_what_they_cannot_express():
    model = read_fields(DIALECTS["both"]).model
    assert Dory().lacks(model) == []
    cycled = ModelDescription(model=model, cycle=CycleConfig(variant="causal-refresh", num_parallel_layers=3, mask_token_id=99))
    with pytest.raises(ModelError, match="a decoder with cycles and normalized true"):
        write_fields(cycled)
