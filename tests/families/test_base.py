"""What all families share, on a family that adds nothing."""

import dataclasses
from typing import Any

import pytest

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.config.decoder import decoder_of, method_of, schedule_of
from megatron_dmtd.errors import ModelError
from megatron_dmtd.families.base import Defaults, Family, lacking
from megatron_dmtd.families.fields import Fields
from tests.support.tiny import tiny_config

FIELDS = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


class Plain(Family):
    """A decoder without norms of queries and keys, biases or windows."""

    model_type = "plain"
    architecture = "PlainForCausalLM"
    defaults = Defaults(max_position_embeddings=77, num_key_value_heads=2, rope_theta=500.0)

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        return {"qk_norm": False, "qkv_bias": fields.flag("attention_bias", False)}

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": model.qkv_bias}

    def lacks(self, model: ModelConfig) -> list[str]:
        return lacking(model, qk_norm=model.qk_norm, window=bool(model.sliding_window))


def read(**changes: Any) -> ModelConfig:
    return Plain().read(Fields(FIELDS | changes)).model


def test_what_a_file_does_not_say_is_the_familys_default_or_follows_from_the_sizes():
    model = read()
    assert (model.family, model.max_position_embeddings, model.num_key_value_heads, model.rope_theta) == ("plain", 77, 2, 500.0)
    assert (model.head_dim, model.rms_norm_eps, model.init_std, model.tie_word_embeddings) == (8, 1e-6, 0.02, False)
    assert read(num_key_value_heads=4, head_dim=16, attention_bias=True) == dataclasses.replace(
        model, num_key_value_heads=4, head_dim=16, qkv_bias=True
    )


def test_a_description_is_vanilla_and_folds_to_decoder_method_and_schedule():
    found = Plain().read(Fields(FIELDS))
    assert found.cycle.is_vanilla
    assert found.decoder == decoder_of(found.model) and found.decoder.num_layers == 4
    assert found.method == method_of(found.cycle) and found.schedule == schedule_of(found.model, found.cycle)


def test_everything_that_is_written_is_read_again():
    written = Plain().write(description := Plain().read(Fields(FIELDS | {"attention_bias": True, "rope_theta": 123.0})))
    assert written["model_type"] == "plain" and written["architectures"] == ["PlainForCausalLM"]
    assert Plain().read(Fields(written)) == description


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"a_newer_setting": 3}, "a_newer_setting"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, named):
    fields = {name: value for name, value in (FIELDS | changes).items() if value is not None}
    with pytest.raises(ModelError, match=named):
        Plain().read(Fields(fields))


def test_several_faults_come_together():
    with pytest.raises(ModelError) as caught:
        read(mlp_bias=True, num_experts=8, unheard_of=1)
    assert all(name in caught.value.found for name in ("mlp_bias", "mixture of experts", "unheard_of"))


def test_parts_that_a_family_has_no_words_for_are_named():
    model = tiny_config(model={"sliding_window": 8}).model
    assert Plain().lacks(model) == ["qk_norm true", "sliding_window 8"]
    assert lacking(model, uneven_bias=True, no_qk_norm=False) == ["qkv_bias False with output_bias False"]
    for name in ("read_parts", "write_parts", "lacks"):
        with pytest.raises(NotImplementedError):
            getattr(Family(), name)(*([model] if name != "read_parts" else [Fields({}), {}]))
