"""Engines on the weights of the oracle of looped decoders."""

from __future__ import annotations

import torch

from megatron_dmtd.architecture import make_schedule
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.config.sections import ModelConfig
from megatron_dmtd.cycle import ORDINARY, VARIANTS, Method
from megatron_dmtd.inference import Engine, EngineConfig
from megatron_dmtd.inference.weights import ModelWeights, build_model
from tests.oracles.looped import Looped, LoopedDecoder, Weights, pieces_of

KINDS = {"-".join(kind): name for name, kind in VARIANTS.items()}


def config_of(shape: Looped, *, num_loops: int = 2, mode: str = "per_loop") -> ModelConfig:
    """The oracle's model as settings."""
    windows = {window for window in shape.windows if window is not None}
    assert len(windows) <= 1, windows
    return ModelConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=96,
        rope_theta=shape.theta,
        rms_norm_eps=shape.rms_eps,
        tie_word_embeddings=not shape.normalized,
        sliding_window=max(windows, default=0),
        windowed_layers=tuple(layer for layer, window in enumerate(shape.windows) if window is not None),
        normalized=shape.normalized,
        step_init=shape.step_init,
        second_rope_theta=shape.second_theta,
        second_rope_layers=shape.second_theta_layers,
        num_input_layers=shape.num_input_layers,
        num_recurrent_layers=shape.num_recurrent_layers,
        num_loops=num_loops,
        recurrent_kv_cache_mode=mode,
        injection=shape.injection,
        init_std=shape.init_std,
    )


def method_of(shape: Looped, kind: str) -> Method:
    """Cycles of one of the four kinds; `vanilla` without parallel layers."""
    if kind == "vanilla":
        return ORDINARY
    return Method(
        variant=KINDS[kind],
        cycle_length=shape.cycle_length,
        mask_token_id=shape.mask_token_id,
        num_parallel_layers=shape.num_parallel_layers,
    )


def model_of(
    shape: Looped, weights: Weights, kind: str = "vanilla", *, num_loops: int = 2, mode: str = "per_loop", dtype=torch.float64
) -> ModelWeights:
    """The oracle's weights, fused for the engine."""
    schedule = make_schedule(decoder_of(config_of(shape, num_loops=num_loops, mode=mode)), method_of(shape, kind))
    return build_model(schedule, lambda name: weights[name], dtype=dtype)


def engine_of(shape: Looped, weights: Weights, kind: str = "vanilla", *, dtype=torch.float64, **options) -> Engine:
    """An engine of little room; `options` are its own, or settings of its config."""
    own = {name: options.pop(name) for name in ("num_loops", "kv_mode", "prefill_chunk") if name in options}
    model = model_of(shape, weights, kind, dtype=dtype)
    config = EngineConfig(
        **{"max_batch": 3, "page_size": 4, "max_length": 96, "cache_tokens": 400, "chunk_tokens": 64, **options}
    )
    return Engine(model, config, **own)


def oracle_logits(
    shape: Looped,
    weights: Weights,
    tokens: list[int],
    *,
    prompt_length: int,
    chunk: int,
    mode: str,
    loops: int | tuple,
    kind: str = "vanilla",
    expiry: dict[int, int] | None = None,
) -> torch.Tensor:
    """Logits `[N, V]` after each token, the prompt in pieces and the rest one by one."""
    history, block_attention = kind.split("-") if kind != "vanilla" else ("real", "causal")
    decoder = LoopedDecoder(weights, shape, mode, history, block_attention, expiry=expiry or {})
    loops, found = (loops,) if isinstance(loops, int) else loops, []
    for length in pieces_of(prompt_length, chunk) + [1] * (len(tokens) - prompt_length):
        start = decoder.position
        number = loops[min(max(0, start - prompt_length + 1), len(loops) - 1)]
        found.append(decoder.take(tokens[start : start + length], number))
    return torch.cat(found)


def logprobs_of(logits_NV: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Log probability of each token but the first."""
    return logits_NV[: len(tokens) - 1].log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
