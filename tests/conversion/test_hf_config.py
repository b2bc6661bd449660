import json

import pytest

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.conversion.hf_config import from_hf_config, read_hf_fields, to_hf_config
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import ConfigError, ConversionError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
CYCLE_FIELDS = {
    "mtp_horizon": 4,
    "num_parallel_layers": 3,
    "num_sequential_layers": 1,
    "mask_token_id": 99,
    "dmtd_history_mode": "real",
    "dmtd_block_attention": "causal",
}
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position_embeddings=512,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    init_std=0.01,
)


@pytest.mark.parametrize("variant", [*sorted(VARIANTS), "vanilla"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_there_and_back(variant, qk_norm):
    model = ModelConfig(**{name: getattr(MODEL, name) for name in MODEL.__slots__} | {"qk_norm": qk_norm})
    cycle = (
        CycleConfig(variant=variant)
        if variant == "vanilla"
        else CycleConfig(variant=variant, num_parallel_layers=3, mask_token_id=7)
    )
    fields = json.loads(json.dumps(to_hf_config(model, cycle)))
    assert from_hf_config(fields) == (model, cycle)


def test_the_foreign_fields_of_a_cycle():
    cycle = CycleConfig(variant="bidirectional-norefresh", num_parallel_layers=3, cycle_length=2, mask_token_id=7)
    fields = to_hf_config(MODEL, cycle)
    assert (fields["model_type"], fields["architectures"]) == ("dmtdqwen3", ["DMTDQwen3ForCausalLM"])
    assert {name: fields[name] for name in CYCLE_FIELDS} == {
        "mtp_horizon": 2,
        "num_parallel_layers": 3,
        "num_sequential_layers": 1,
        "mask_token_id": 7,
        "dmtd_history_mode": "shadow",
        "dmtd_block_attention": "bidirectional",
    }


def test_reads_what_transformers_5_writes():
    from transformers import LlamaConfig, Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 5e5}
    for theirs, qk_norm in ((Qwen3Config, True), (LlamaConfig, False)):
        fields = json.loads(theirs(**SIZES, head_dim=16, num_key_value_heads=2, rope_parameters=rope).to_json_string())
        model, cycle = from_hf_config(fields)
        assert (model.qk_norm, model.rope_theta, model.head_dim, model.num_key_value_heads) == (qk_norm, 5e5, 16, 2)
        assert cycle.is_vanilla


def test_what_a_silent_config_means_is_what_transformers_assumes():
    from transformers import LlamaConfig, Qwen3Config

    for model_type, theirs in (("llama", LlamaConfig(**SIZES)), ("qwen3", Qwen3Config(**SIZES | {"num_attention_heads": 32}))):
        sizes = SIZES | {"num_attention_heads": theirs.num_attention_heads}
        model, _ = from_hf_config(sizes | {"model_type": model_type})
        names = ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
        assert [getattr(model, name) for name in names] == [getattr(theirs, name) for name in names]
        assert model.init_std == theirs.initializer_range
        assert model.rope_theta == theirs.rope_parameters["rope_theta"]


def test_reads_the_spelling_of_transformers_4():
    model, _ = from_hf_config(SIZES | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None})
    assert (model.rope_theta, model.head_dim, model.num_key_value_heads) == (5e5, 8, 8)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"hidden_size": None}, "no hidden_size"),
    ],
)
def test_what_we_lack_is_refused_by_name(fields, named):
    accepted = SIZES | {"model_type": "llama"}
    from_hf_config(accepted)
    with pytest.raises(ConversionError) as caught:
        from_hf_config(accepted | fields)
    assert named in caught.value.found


def test_all_refusals_come_at_once():
    with pytest.raises(ConversionError) as caught:
        from_hf_config(SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True})
    assert caught.value.found == "attention_bias true; mlp_bias true"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dmtd_history_mode": "imaginary"}, "dmtd_history_mode 'imaginary'"),
        ({"num_parallel_layers": 2}, "num_parallel_layers + num_sequential_layers = 3"),
    ],
)
def test_cycles_that_contradict_are_refused(change, named):
    fields = SIZES | {"model_type": "dmtdqwen3", "num_key_value_heads": 8} | CYCLE_FIELDS
    assert from_hf_config(fields)[1].variant == "causal-refresh"
    with pytest.raises(ConversionError) as caught:
        from_hf_config(fields | change)
    assert named in caught.value.found


def test_a_dmtd_config_without_its_cycles_is_refused():
    with pytest.raises(ConversionError, match="no mtp_horizon; no num_parallel_layers"):
        from_hf_config(SIZES | {"model_type": "dmtdqwen3", "num_key_value_heads": 8})


def test_shapes_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="8 query heads over 3"):
        from_hf_config(SIZES | {"model_type": "llama", "num_key_value_heads": 3})


def test_an_absent_or_broken_config_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="No such file"):
        read_hf_fields(tmp_path)
    for text, message in (("{", "Expecting property name"), ("[]", "holds no object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConversionError, match=message):
            read_hf_fields(tmp_path)
