import dataclasses
import json

import pytest

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import ConfigError, ModelError
from megatron_dmtd.families import FAMILIES, ModelDescription, read_directory, read_fields, read_hf_fields, write_fields

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
    family = "auto" if variant != "vanilla" else "qwen3" if qk_norm else "llama"
    model = dataclasses.replace(MODEL, qk_norm=qk_norm, family=family)
    cycle = (
        CycleConfig(variant=variant)
        if variant == "vanilla"
        else CycleConfig(variant=variant, num_parallel_layers=3, mask_token_id=7)
    )
    fields = json.loads(json.dumps(write_fields(ModelDescription(model=model, cycle=cycle))))
    assert read_fields(fields) == ModelDescription(model=model, cycle=cycle)


def test_the_foreign_fields_of_a_cycle():
    cycle = CycleConfig(variant="bidirectional-norefresh", num_parallel_layers=3, cycle_length=2, mask_token_id=7)
    fields = write_fields(ModelDescription(model=MODEL, cycle=cycle))
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
        found = read_fields(fields)
        model = found.model
        assert (model.qk_norm, model.rope_theta, model.head_dim, model.num_key_value_heads) == (qk_norm, 5e5, 16, 2)
        assert found.method.is_vanilla


def test_what_a_silent_config_means_is_what_transformers_assumes():
    from transformers import LlamaConfig, Qwen3Config

    for model_type, theirs in (("llama", LlamaConfig(**SIZES)), ("qwen3", Qwen3Config(**SIZES | {"num_attention_heads": 32}))):
        sizes = SIZES | {"num_attention_heads": theirs.num_attention_heads}
        model = read_fields(sizes | {"model_type": model_type}).model
        names = ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
        assert [getattr(model, name) for name in names] == [getattr(theirs, name) for name in names]
        assert model.init_std == theirs.initializer_range
        assert model.rope_theta == theirs.rope_parameters["rope_theta"]


def test_reads_the_spelling_of_transformers_4():
    model = read_fields(SIZES | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}).model
    assert (model.rope_theta, model.head_dim, model.num_key_value_heads) == (5e5, 8, 8)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved true"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
        ({"hidden_size": "64"}, "hidden_size '64', which is not an integer"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types ['full_attention', 'sliding_attention']"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"hidden_size": None}, "no hidden_size"),
    ],
)
def test_what_we_lack_is_refused_by_name(fields, named):
    accepted = SIZES | {"model_type": "llama"}
    read_fields(accepted)
    with pytest.raises(ModelError) as caught:
        read_fields(accepted | fields)
    assert named in caught.value.found


def test_all_refusals_come_at_once():
    with pytest.raises(ModelError) as caught:
        read_fields(SIZES | {"model_type": "llama", "soft_cap": 3, "mlp_bias": True})
    assert caught.value.found == "mlp_bias true; soft_cap 3"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dmtd_history_mode": "imaginary"}, "dmtd_history_mode 'imaginary'"),
        ({"num_parallel_layers": 2}, "num_parallel_layers + num_sequential_layers = 3"),
    ],
)
def test_cycles_that_contradict_are_refused(change, named):
    fields = SIZES | {"model_type": "dmtdqwen3", "num_key_value_heads": 8} | CYCLE_FIELDS
    assert read_fields(fields).method.variant == "causal-refresh"
    with pytest.raises(ModelError) as caught:
        read_fields(fields | change)
    assert named in caught.value.found


def test_a_dmtd_config_without_its_cycles_is_refused():
    with pytest.raises(ModelError, match="no mtp_horizon; no num_parallel_layers"):
        read_fields(SIZES | {"model_type": "dmtdqwen3", "num_key_value_heads": 8})


def test_shapes_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="8 query heads over 3"):
        read_fields(SIZES | {"model_type": "llama", "num_key_value_heads": 3})


def test_an_absent_or_broken_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_hf_fields(tmp_path)
    for text, message in (("{", "Expecting property name"), ("[]", "it is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            read_directory(tmp_path)


def fields_of(config) -> dict:
    """As transformers writes it, and as a file with every key has it."""
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_field_that_transformers_writes_is_unknown(model_type):
    from transformers import AutoConfig

    import megatron_dmtd.hf  # noqa: F401 - registers dmtdqwen3

    groups = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 3}
    extra = {"dmtdqwen3": CYCLE_FIELDS, "dory": groups}.get(model_type, {})
    config = AutoConfig.for_model(model_type, **SIZES, **extra, num_key_value_heads=2)
    for fields in (fields_of(config), json.loads(config.to_json_string(use_diff=True)) | {"model_type": model_type}):
        assert read_fields(fields).model.num_layers == 4


def test_a_model_without_a_family_that_has_its_parts_is_refused():
    uneven = dataclasses.replace(MODEL, qk_norm=True, qkv_bias=True, output_bias=False)
    with pytest.raises(ModelError, match="a decoder that it cannot describe"):
        write_fields(ModelDescription(model=uneven, cycle=CycleConfig(variant="vanilla")))
    named = dataclasses.replace(MODEL, family="llama")
    with pytest.raises(ModelError, match="llama has no qk_norm true"):
        write_fields(ModelDescription(model=named, cycle=CycleConfig(variant="vanilla")))


@pytest.mark.parametrize(
    "parts",
    [
        {"qkv_bias": True, "output_bias": True},
        {"qkv_bias": True, "output_bias": False, "qk_norm": False},
        {"sliding_window": 8},
        {"sliding_window": 8, "windowed_layers": (1, 2)},
    ],
)
def test_a_dmtd_model_has_words_for_every_part(parts):
    model = dataclasses.replace(MODEL, **parts)
    description = ModelDescription(
        model=model, cycle=CycleConfig(variant="causal-refresh", num_parallel_layers=3, mask_token_id=7)
    )
    assert read_fields(json.loads(json.dumps(write_fields(description)))) == description
