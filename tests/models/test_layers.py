"""A layer is built from its LayerSpec: shapes and settings of its own, on one Megatron configuration where layers are alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_dmtd.architecture import AttentionSpec, LayerSpec, MLPSpec, NormSpec, RotaryProfile, make_schedule
from megatron_dmtd.architecture.tensors import num_layer_parameters
from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.cycle import Method
from megatron_dmtd.parallel.placement import place_schedule
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config

OTHER = LayerSpec(
    attention=AttentionSpec(
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rotary=RotaryProfile(theta=5e5),
        qkv_bias=True,
        output_bias=True,
        window=6,
    ),
    mlp=MLPSpec(intermediate_size=24),
    norm=NormSpec(eps=1e-3),
)


def built(config: Config, layers: tuple[LayerSpec, ...]) -> tuple[list[dict[str, tuple[int, ...]]], list[float], int, bool]:
    """Shapes of each layer's parameters, epsilons, number of configurations, and whether each gets a gradient. Runs in a rank."""
    from megatron_dmtd.models.model import CycleModel
    from megatron_dmtd.models.transformer_config import transformer_config
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron

    init_parallel(config, prepare_megatron())
    method = Method(variant="bidirectional-refresh", cycle_length=4, mask_token_id=99, num_parallel_layers=2)
    schedule = make_schedule(replace(decoder_of(config.model), layers=layers), method)
    placement = place_schedule(schedule, config.parallel)
    model = CycleModel(config, transformer_config(config, on_cuda=False), placement, placement.stages[0], backend="dense")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    tokens, positions = torch.arange(1, 33)[None], torch.arange(32)[None]
    model(tokens, positions, tokens, document_lengths=((32,),)).sum().backward()
    learns = all(parameter.grad is not None and bool(parameter.grad.abs().max() > 0) for parameter in model.parameters())
    blocks = model.decoder.layers
    shapes = [{name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} for layer in blocks]
    return shapes, [layer.pre_mlp_layernorm.eps for layer in blocks], len({id(layer.config) for layer in blocks}), learns


@pytest.mark.multiprocess
def test_layers_of_different_shapes_stand_in_one_model() -> None:
    config = tiny_config()
    first = decoder_of(config.model).layers[0]
    layers = (first, OTHER, OTHER, first)
    shapes, epsilons, _, learns = run_ranks(1, built, config, layers)[0]
    for found, layer in zip(shapes, layers, strict=True):
        numbers = sum(torch.Size(shape).numel() for shape in found.values())
        assert numbers == num_layer_parameters(layer, config.model.hidden_size)
    assert shapes[1]["self_attention.linear_qkv.bias"] == (64,) and "self_attention.linear_qkv.bias" not in shapes[0]
    assert shapes[1]["self_attention.linear_proj.bias"] == (32,) and "mlp.linear_fc2.bias" not in shapes[1]
    assert epsilons == [1e-6, 1e-3, 1e-3, 1e-6]
    assert learns


@pytest.mark.multiprocess
def test_layers_that_are_alike_share_megatrons_configuration() -> None:
    config = tiny_config()
    assert run_ranks(1, built, config, decoder_of(config.model).layers)[0][2] == 1
