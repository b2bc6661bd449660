import pytest
import torch

from megatron_dmtd.hf.dmtd_layers import RotaryAngles
from tests.hf.tiny import tiny_config, tiny_model, vanilla_decoder


def test_scaled_rotary_frequencies_are_those_of_transformers():
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    model = tiny_model("causal-refresh", dtype=torch.float32, rope_parameters=rope)
    position = torch.arange(100)[None]
    cos, sin = RotaryAngles(model.config)(position, torch.float32)
    expected_cos, expected_sin = vanilla_decoder(model).model.rotary_emb(torch.zeros(1), position)
    assert torch.equal(cos, expected_cos) and torch.equal(sin, expected_sin)
    plain, _ = RotaryAngles(tiny_config("causal-refresh"))(position, torch.float32)
    assert not torch.allclose(plain, cos)


@pytest.mark.parametrize(
    ("rope", "found"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type='dynamic'"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_rotary_embeddings_that_cached_keys_cannot_follow_are_refused(rope, found):
    with pytest.raises(ValueError, match=found):
        tiny_model("causal-refresh", rope_parameters=rope)
