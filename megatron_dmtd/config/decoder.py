"""The decoder, the method, and the schedule of the two, as values made from the flat settings of a run."""

from __future__ import annotations

import math
from functools import lru_cache

from megatron_dmtd.architecture import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LoopSpec,
    MLPSpec,
    NormSpec,
    RotaryProfile,
    ScaleSpec,
    Schedule,
    StepSpec,
    make_schedule,
)
from megatron_dmtd.config.sections import CycleConfig, ModelConfig
from megatron_dmtd.cycle import ORDINARY, Method


def decoder_of(model: ModelConfig) -> DecoderSpec:
    """The decoder that validated settings describe."""
    norm = NormSpec(eps=model.rms_norm_eps, kind="unit" if model.normalized else "rms")
    return DecoderSpec(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        layers=tuple(_layer(model, norm, index) for index in range(model.num_layers)),
        final_norm=norm,
        tie_word_embeddings=model.tie_word_embeddings,
        max_position_embeddings=model.max_position_embeddings,
        logit_scale=_scale(model, 1.0),
        loop=_loop(model, norm),
    )


def _layer(model: ModelConfig, norm: NormSpec, index: int) -> LayerSpec:
    is_windowed = model.sliding_window > 0 and (not model.windowed_layers or index in model.windowed_layers)
    inner_norm = norm if model.normalized else None
    step_scale = _scale(model, model.step_init)
    step = None if step_scale is None else StepSpec(scale=step_scale, norm=norm)
    # The scales of gate and up are stored as they are, and multiplied by the root of the width.
    mlp_scale = ScaleSpec(initial=1.0, multiplier=math.sqrt(model.hidden_size)) if model.normalized else None
    return LayerSpec(
        attention=AttentionSpec(
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            rotary=RotaryProfile(
                theta=model.second_rope_theta if index in model.second_rope_layers else model.rope_theta,
                scaling=model.rope_scaling,
            ),
            qk_norm=norm if model.qk_norm else None,
            qkv_bias=model.qkv_bias,
            output_bias=model.output_bias,
            window=model.sliding_window if is_windowed else None,
            query_scale=_scale(model, math.sqrt(model.head_dim), power=2),
            gate=_scale(model, math.sqrt(model.attention_gate_init or math.sqrt(model.hidden_size)), power=2),
            output_norm=inner_norm,
        ),
        mlp=MLPSpec(intermediate_size=model.intermediate_size, gate_scale=mlp_scale, up_scale=mlp_scale, inner_norm=inner_norm),
        norm=norm,
        attention_step=step,
        mlp_step=step,
    )


def _scale(model: ModelConfig, initial_root: float, *, power: int = 1) -> ScaleSpec | None:
    """A scale of a normalized decoder, stored in units of `init_std`: `initial_root ** power` in a new model."""
    if not model.normalized:
        return None
    return ScaleSpec(initial=model.init_std, multiplier=initial_root / model.init_std, power=power)


def _loop(model: ModelConfig, norm: NormSpec) -> LoopSpec | None:
    if not model.num_recurrent_layers:
        return None
    return LoopSpec(
        first_layer=model.num_input_layers,
        num_layers=model.num_recurrent_layers,
        num_loops=model.num_loops,
        kv_cache_mode=model.recurrent_kv_cache_mode,
        injection=model.injection,
        norm=norm if model.injection == "residual" else None,
    )


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
