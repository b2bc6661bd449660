"""The decoder, the method, and the schedule of the two, as values made from the flat settings of a run."""

from __future__ import annotations

from functools import lru_cache

from megatron_dmtd.architecture import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RotaryProfile,
    Schedule,
    make_schedule,
    uniform_layers,
)
from megatron_dmtd.config.sections import CycleConfig, ModelConfig
from megatron_dmtd.cycle import ORDINARY, Method


def decoder_of(model: ModelConfig) -> DecoderSpec:
    """The decoder that validated settings describe."""
    norm = NormSpec(eps=model.rms_norm_eps)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            rotary=RotaryProfile(theta=model.rope_theta, scaling=model.rope_scaling),
            qk_norm=norm if model.qk_norm else None,
            qkv_bias=model.qkv_bias,
            output_bias=model.output_bias,
            window=model.sliding_window or None,
        ),
        mlp=MLPSpec(intermediate_size=model.intermediate_size),
        norm=norm,
    )
    return DecoderSpec(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        layers=uniform_layers(layer, model.num_layers, is_windowed=_is_windowed(model)),
        final_norm=norm,
        tie_word_embeddings=model.tie_word_embeddings,
        max_position_embeddings=model.max_position_embeddings,
    )


def _is_windowed(model: ModelConfig) -> tuple[bool, ...]:
    if not model.sliding_window or not model.windowed_layers:
        return ()
    return tuple(layer in model.windowed_layers for layer in range(model.num_layers))


def method_of(cycle: CycleConfig) -> Method:
    """The method that validated settings describe."""
    if cycle.is_vanilla:
        return ORDINARY
    return Method(
        variant=cycle.variant,
        cycle_length=cycle.cycle_length,
        mask_token_id=cycle.mask_token_id,
        num_parallel_layers=cycle.num_parallel_layers,
    )


@lru_cache(maxsize=64)
def schedule_of(model: ModelConfig, cycle: CycleConfig) -> Schedule:
    """The schedule that validated settings describe."""
    return make_schedule(decoder_of(model), method_of(cycle))
