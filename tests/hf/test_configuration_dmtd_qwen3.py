import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM, DMTDQwen3Model
from megatron_dmtd.hf.dmtd_layers import RotaryAngles
from tests.hf.tiny import tiny_config


def test_default_fields_are_those_of_the_4b_model_of_the_specification():
    config = DMTDQwen3Config()
    assert (config.num_parallel_layers, config.num_sequential_layers, config.num_hidden_layers) == (28, 8, 36)
    assert (config.mtp_horizon, config.mask_token_id) == (4, 151660)
    assert config.model_type == "dmtdqwen3"


def test_importing_the_package_registers_the_auto_classes():
    config = AutoConfig.for_model(**tiny_config("causal-refresh").to_dict())
    assert type(config) is DMTDQwen3Config and config.dmtd_history_mode == "real"
    assert type(AutoModelForCausalLM.from_config(config)) is DMTDQwen3ForCausalLM
    assert type(AutoModel.from_config(config)) is DMTDQwen3Model


def test_fields_survive_saving_and_loading(tmp_path):
    config = tiny_config("bidirectional-norefresh", qk_norm=False, mtp_horizon=3)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    assert (loaded.qk_norm, loaded.mtp_horizon, loaded.dmtd_block_attention) == (False, 3, "bidirectional")


@pytest.mark.parametrize(
    "changes",
    [{"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"rope_parameters": None, "rope_theta": 500.0}],
    ids=["5.x", "4.x"],
)
def test_the_rotary_base_is_read_from_either_field(changes):
    assert RotaryAngles(tiny_config("causal-refresh", **changes)).theta == 500.0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"mtp_horizon": 0}, "mtp_horizon=0"),
        ({"num_hidden_layers": 5}, "num_hidden_layers=5"),
        ({"num_parallel_layers": 0}, "num_parallel_layers=0"),
        ({"num_sequential_layers": 0}, "num_sequential_layers=0"),
        ({"mask_token_id": 61}, "mask_token_id=61, vocab_size=61"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"dmtd_history_mode": "refresh"}, "dmtd_history_mode='refresh'"),
        ({"dmtd_block_attention": "full"}, "dmtd_block_attention='full'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' in layer_types with sliding_window=None"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' in layer_types"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_contradictions_are_refused_by_name(changes, found):
    with pytest.raises(ValueError, match=found) as error:
        tiny_config("causal-refresh", **changes)
    assert "required: " in str(error.value) and "remedy: " in str(error.value)


def test_a_field_assigned_later_is_checked_when_the_model_is_made():
    config = tiny_config("causal-refresh")
    config.dmtd_history_mode = "both"
    with pytest.raises(ValueError, match="dmtd_history_mode='both'"):
        DMTDQwen3ForCausalLM(config)


def test_each_layer_has_the_window_that_the_fields_say():
    plain = tiny_config("causal-refresh")
    last = tiny_config("causal-refresh", use_sliding_window=True, sliding_window=8, max_window_layers=3)
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = tiny_config("causal-refresh", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert [plain.layer_window(layer) for layer in range(4)] == [None] * 4
    assert [last.layer_window(layer) for layer in range(4)] == [None, None, None, 8]
    assert [listed.layer_window(layer) for layer in range(4)] == [8, None, 8, None]


def test_the_output_bias_is_as_the_others_unless_it_is_named():
    assert tiny_config("causal-refresh", attention_bias=True).attention_output_bias
    assert not tiny_config("causal-refresh", attention_bias=True, attention_output_bias=False).attention_output_bias
