import json

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dmtd.architecture import RopeScaling, RotaryProfile
from megatron_dmtd.architecture.rotary import attention_factor, inverse_frequencies
from megatron_dmtd.errors import ModelError
from megatron_dmtd.families import read_fields
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.rope import read_rope, write_rope

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
#: as published files have it
SPELLINGS = {
    "Llama 3.1": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
    },
    "long Qwen3": {
        "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "max_position_embeddings": 131072,
    },
    "older spelling": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "newer spelling": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 3e4, "factor": 2.0, "beta_fast": 16, "truncate": False}
    },
    "the original context is the whole one": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "its own attention factor": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.5}
    },
    "DeepSeek's factors": {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_slow": 1, "beta_fast": 32},
    },
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_means_what_transformers_makes_of_it(name):
    fields = SIZES | {"model_type": "llama", "max_position_embeddings": 4096} | SPELLINGS[name]
    config = LlamaConfig(**{key: value for key, value in json.loads(json.dumps(fields)).items() if key != "model_type"})
    inverse_F, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    model = read_fields(fields).model
    profile = RotaryProfile(theta=model.rope_theta, scaling=model.rope_scaling)
    assert torch.equal(inverse_frequencies(profile, 16), inverse_F)
    assert attention_factor(model.rope_scaling) == pytest.approx(factor, rel=1e-15)
    written = Fields(write_rope(model.rope_theta, model.rope_scaling))
    assert read_rope(written, default_theta=1.0, max_position_embeddings=7) == (model.rope_theta, model.rope_scaling)
    assert not written.faults and not written.leftovers()


def test_both_spellings_together_must_say_the_same():
    one, other = {"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 4.0}
    accepted = SIZES | {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": one}
    read_fields(accepted | {"rope_parameters": {"type": "linear", "rope_theta": 1e4, "factor": 2.0}})
    with pytest.raises(ModelError, match="contradict each other"):
        read_fields(accepted | {"rope_parameters": other})


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "no rope_scaling.low_freq_factor"),
        ({"rope_type": "linear"}, "no rope_scaling.factor"),
        ({"rope_type": "yarn", "factor": 2.0, "extrapolation": 3}, "rope_scaling.extrapolation 3"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor '2', which is not a number"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_is_missing_or_unknown_inside_is_named(table, named):
    with pytest.raises(ModelError) as caught:
        read_fields(SIZES | {"model_type": "llama", "rope_scaling": table})
    assert named in caught.value.found


def test_default_frequencies_are_written_as_before():
    assert write_rope(5e5, RopeScaling()) == {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_theta": 5e5,
    }
