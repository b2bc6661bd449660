"""The oracle's random weights in the project's own formats."""

from __future__ import annotations

import torch

from megatron_dmtd.architecture import RotaryProfile
from megatron_dmtd.architecture.rotary import attention_factor, inverse_frequencies
from megatron_dmtd.config import Config, ModelConfig
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.weights.megatron_names import from_hf
from tests.oracles.parallel_dmtd import Shape, Weights, random_weights


def shape_of(config: Config) -> Shape:
    """The oracle's description of a model. A vanilla model is described with no parallel layers."""
    model, cycle = config.model, config.cycle
    return Shape(
        num_layers=model.num_layers,
        num_parallel_layers=0 if cycle.is_vanilla else cycle.num_parallel_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
        qk_norm=model.qk_norm,
        tie_word_embeddings=model.tie_word_embeddings,
        qkv_bias=model.qkv_bias,
        output_bias=model.output_bias,
        windows=tuple(layer.attention.window for layer in decoder_of(model).layers),
        frequencies=_frequencies(model),
        rope_factor=attention_factor(model.rope_scaling),
        cycle_length=cycle.cycle_length,
        mask_token_id=cycle.mask_token_id,
    )


def _frequencies(model: ModelConfig) -> tuple[float, ...]:
    """Those of a scaled profile, which are fp32 numbers; the oracle computes the others."""
    if model.rope_scaling.rope_type == "default":
        return ()
    return tuple(inverse_frequencies(RotaryProfile(theta=model.rope_theta, scaling=model.rope_scaling), model.head_dim).tolist())


def wide_weights(config: Config, *, seed: int = 0) -> Weights:
    """Float64 weights, by Hugging Face's names, whose logits spread widely."""
    return random_weights(shape_of(config), seed)


def megatron_tensors(config: Config, weights: Weights) -> dict[str, torch.Tensor]:
    """The weights in fp32 by the names of a whole Megatron model."""
    return from_hf(decoder_of(config.model), {name: tensor.float() for name, tensor in weights.items()})
