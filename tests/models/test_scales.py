"""Scales: their factors in a new model are nGPT's, and tensor-parallel ranks hold parts of one vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.architecture import ScaleSpec
from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from tests.models.looped import dory_config
from tests.support.ranks import run_ranks


def test_a_factor_is_the_stored_number_times_the_multiplier_to_the_power() -> None:
    from megatron_dmtd.models.scales import factor

    stored = torch.tensor([0.5, -1.0])
    assert factor(stored, ScaleSpec(initial=1.0, multiplier=4.0)).tolist() == [2.0, -4.0]
    assert factor(stored.bfloat16(), ScaleSpec(initial=1.0, multiplier=4.0, power=2)).tolist() == [4.0, 16.0]


def scales(config: Config) -> dict[str, tuple[int, float]]:
    """Name -> numbers on this rank, and their mean factor, of the scales of layer 3 and the head. Runs in a rank."""
    from megatron_dmtd.models.scales import factor
    from tests.models.test_initialization import initial_weights

    found, decoder = initial_weights(config), decoder_of(config.model)
    spec = decoder.layers[3]
    own = "decoder.layers.3."
    specs: dict[str, Any] = {
        f"{own}self_attention.query_scale": spec.attention.query_scale,
        f"{own}self_attention.gate_scale": spec.attention.gate,
        f"{own}mlp.gate_scale": spec.mlp.gate_scale,
        f"{own}mlp.up_scale": spec.mlp.up_scale,
        f"{own}self_attn_bda.scale": None if spec.attention_step is None else spec.attention_step.scale,
        f"{own}mlp_bda.scale": None if spec.mlp_step is None else spec.mlp_step.scale,
        "logit_scale": decoder.logit_scale,
    }
    return {name: (found[name].numel(), float(factor(found[name], scale).mean())) for name, scale in specs.items()}


@pytest.mark.multiprocess
def test_new_scales_are_as_published_and_split_over_ranks() -> None:
    whole, half = run_ranks(1, scales, dory_config())[0], run_ranks(2, scales, dory_config(parallel={"tensor": 2}))[0]
    model = dory_config().model
    factors = {name.removeprefix("decoder.layers.3."): found[1] for name, found in whole.items()}
    assert factors == pytest.approx(
        {
            "self_attention.query_scale": model.head_dim,
            "self_attention.gate_scale": model.hidden_size**0.5,
            "mlp.gate_scale": model.hidden_size**0.5,
            "mlp.up_scale": model.hidden_size**0.5,
            "self_attn_bda.scale": 0.05,
            "mlp_bda.scale": 0.05,
            "logit_scale": 1.0,
        }
    )
    for name, (size, _) in whole.items():
        assert half[name][0] == size // (1 if name.endswith("bda.scale") else 2), name
