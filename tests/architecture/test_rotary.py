import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dmtd.architecture import RopeScaling, RotaryProfile
from megatron_dmtd.architecture.rotary import attention_factor, inverse_frequencies, rotary_tables

YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
SCALINGS = {
    "linear": RopeScaling(rope_type="linear", factor=3.0),
    "llama3": RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192),
    "llama3-32": RopeScaling(rope_type="llama3", factor=32.0, original_max_position_embeddings=8192),
    "yarn": YARN,
    "yarn-mscale": RopeScaling(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0, beta_fast=24.0
    ),
    "yarn-own-factor": RopeScaling(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=2048, attention_factor=1.25, truncate=False
    ),
}


def in_transformers(theta: float, head_dim: int, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    fields = {name: getattr(scaling, name) for name in vars(scaling) if getattr(scaling, name)}
    fields["truncate"] = scaling.truncate
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=fields | {"rope_theta": theta},
    )
    return ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(500_000.0, 128), (1e6, 64), (10_000.0, 8)])
def test_scaled_frequencies_are_those_of_transformers_bit_for_bit(name, theta, head_dim):
    scaling = SCALINGS[name]
    expected_F, expected_factor = in_transformers(theta, head_dim, scaling)
    profile = RotaryProfile(theta=theta, scaling=scaling)
    assert torch.equal(inverse_frequencies(profile, head_dim), expected_F)
    assert attention_factor(scaling) == pytest.approx(expected_factor, rel=1e-15)
    plain_F = inverse_frequencies(RotaryProfile(theta=theta), head_dim)
    assert not torch.equal(expected_F, plain_F), "the scaling must change something"


def test_the_default_profile_is_the_published_formula_in_the_type_asked_for():
    wide_F = inverse_frequencies(RotaryProfile(theta=10_000.0), 8, dtype=torch.float64)
    assert wide_F.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-15)
    assert inverse_frequencies(RotaryProfile(theta=10_000.0), 8).dtype == torch.float32


def test_yarn_multiplies_cosines_and_sines_by_its_factor_once():
    cos, sin = rotary_tables(torch.tensor([0, 5]), RotaryProfile(theta=1e6, scaling=YARN), 16, torch.float32)
    factor = 0.1 * math.log(4.0) + 1.0
    assert cos[0].tolist() == pytest.approx([factor] * 16, rel=1e-6)
    assert (cos[1] ** 2 + sin[1] ** 2).tolist() == pytest.approx([factor**2] * 16, rel=1e-6)


def test_both_halves_of_a_head_have_the_same_angles():
    cos, sin = rotary_tables(torch.arange(7)[None], RotaryProfile(theta=1e4), 8, torch.float64)
    assert cos.shape == (1, 7, 8) and torch.equal(cos[..., :4], cos[..., 4:]) and torch.equal(sin[..., :4], sin[..., 4:])
    assert sin[0, 3, 1].item() == pytest.approx(math.sin(3 * 0.1), rel=1e-15)
