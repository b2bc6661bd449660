"""Engines on the weights of the float64 oracle, whatever parts their layers have."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_dmtd.architecture import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
    RotaryProfile,
    make_schedule,
)
from megatron_dmtd.architecture.rotary import attention_factor, inverse_frequencies
from megatron_dmtd.cycle import ORDINARY, VARIANTS, Method
from megatron_dmtd.families import hf_name
from megatron_dmtd.inference.weights import ModelWeights, build_model
from tests.oracles.parallel_dmtd import Shape

YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
NUM_POSITIONS = 96


def yarn(*, theta: float = 10_000.0, head_dim: int = 8) -> dict:
    """Fields of a `Shape` whose frequencies are scaled."""
    frequencies = inverse_frequencies(RotaryProfile(theta=theta, scaling=YARN), head_dim)
    return {"rope_theta": theta, "frequencies": tuple(frequencies.tolist()), "rope_factor": attention_factor(YARN)}


def decoder_of(shape: Shape) -> DecoderSpec:
    """The oracle's decoder as data. Scaled frequencies are those of `YARN`."""
    norm = NormSpec(eps=shape.rms_norm_eps)
    rotary = RotaryProfile(theta=shape.rope_theta, scaling=YARN if shape.frequencies else RopeScaling())

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            rotary=rotary,
            qk_norm=norm if shape.qk_norm else None,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            window=window,
        )
        return LayerSpec(attention=attention, mlp=MLPSpec(intermediate_size=shape.intermediate_size), norm=norm)

    return DecoderSpec(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        layers=tuple(layer(window) for window in shape.windows or (None,) * shape.num_layers),
        final_norm=norm,
        tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=NUM_POSITIONS,
    )


def method_of(shape: Shape, history: str, block_attention: str) -> Method:
    """The oracle's method; vanilla without parallel layers."""
    if not shape.num_parallel_layers:
        return ORDINARY
    names = {value: name for name, value in VARIANTS.items()}
    return Method(
        variant=names[history, block_attention],
        cycle_length=shape.cycle_length,
        mask_token_id=shape.mask_token_id,
        num_parallel_layers=shape.num_parallel_layers,
    )


def model_of(
    shape: Shape,
    weights: Mapping[str, torch.Tensor],
    history: str = "",
    block_attention: str = "",
    *,
    dtype: torch.dtype = torch.float64,
    matrix_dtype: torch.dtype | None = None,
) -> ModelWeights:
    """The oracle's weights, fused for the engine."""
    schedule = make_schedule(decoder_of(shape), method_of(shape, history, block_attention))
    return build_model(schedule, lambda name: weights[hf_name(name, schedule.decoder)], dtype=dtype, matrix_dtype=matrix_dtype)
