"""Tiny decoders with looped layers, and transformers' Dory with the same weights."""

from __future__ import annotations

from typing import Any

import torch

from megatron_dmtd.config import Config, ModelConfig
from tests.support.tiny import tiny_config

#: Five layers, one in, three in the loop, one out; the fourth sees all tokens and has another rotary base.
DORY: dict[str, Any] = {
    "num_layers": 5,
    "normalized": True,
    "tie_word_embeddings": False,
    "init_std": 0.02,
    "sliding_window": 6,
    "windowed_layers": (0, 1, 2, 4),
    "second_rope_theta": 1e6,
    "second_rope_layers": (3,),
    "num_input_layers": 1,
    "num_recurrent_layers": 3,
    "num_loops": 2,
}


def dory_config(variant: str = "vanilla", *, num_loops: int = 2, **sections: dict[str, Any]) -> Config:
    """A Dory of five layers that takes milliseconds a step; a DMTD variant has its first four layers, or `cycle`'s, parallel."""
    model = DORY | {"num_loops": num_loops} | sections.pop("model", {})
    cycle = {"num_parallel_layers": 4} | sections.pop("cycle", {})
    return tiny_config(variant, model=model, cycle=cycle, **sections)


def random_dory(model: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by the names of a whole Megatron model. Scales lie around their initial values, and no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    width, query, key = model.hidden_size, model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim

    def matrix(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread / columns**0.5

    def scale(size: int, initial: float) -> torch.Tensor:
        return initial * (0.5 + torch.rand(size, generator=generator, dtype=torch.float64))

    std = model.init_std
    table = torch.zeros(128, width, dtype=torch.float64)
    table[: model.vocab_size] = torch.nn.functional.normalize(matrix(model.vocab_size, width))
    head = torch.zeros_like(table)
    head[: model.vocab_size] = matrix(model.vocab_size, width, spread=30.0)
    found = {"embedding.word_embeddings.weight": table, "output_layer.weight": head}
    found["logit_scale"] = torch.nn.functional.pad(scale(model.vocab_size, std), (0, 128 - model.vocab_size), value=std)
    for index in range(model.num_layers):
        prefix = f"decoder.layers.{index}."
        found |= {
            f"{prefix}self_attention.linear_qkv.weight": matrix(query + 2 * key, width),
            f"{prefix}self_attention.linear_gate.weight": matrix(query, width),
            f"{prefix}self_attention.query_scale": scale(query, 1.5 * std),
            f"{prefix}self_attention.gate_scale": scale(query, std),
            f"{prefix}self_attention.linear_proj.weight": matrix(width, query),
            f"{prefix}mlp.linear_fc1.weight": matrix(2 * model.intermediate_size, width),
            f"{prefix}mlp.gate_scale": scale(model.intermediate_size, 1.0),
            f"{prefix}mlp.up_scale": scale(model.intermediate_size, 1.0),
            f"{prefix}mlp.linear_fc2.weight": matrix(width, model.intermediate_size),
            # One negative step, of which the model takes the absolute value.
            f"{prefix}self_attn_bda.scale": scale(width, 5 * std) * torch.where(torch.arange(width) == 3, -1.0, 1.0),
            f"{prefix}mlp_bda.scale": scale(width, 5 * std),
        }
    return found


def published_dory(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with these weights, in fp64; its norms compute in fp32."""
    from transformers import DoryConfig, DoryForCausalLM

    full = [index for index in range(model.num_layers) if index not in model.windowed_layers]
    config = DoryConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        initializer_range=model.init_std,
        sliding_window=model.sliding_window,
        layer_types=["full_attention" if index in full else "sliding_attention" for index in range(model.num_layers)],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": model.rope_theta},
            "full_attention": {"rope_type": "default", "rope_theta": model.second_rope_theta},
        },
        ngpt_alpha_init=model.step_init,
        n_input_layers=model.num_input_layers,
        n_recurrent_layers=model.num_recurrent_layers,
        n_output_layers=model.num_layers - model.num_input_layers - model.num_recurrent_layers,
        n_recurrent_loops=model.num_loops,
    )
    published = DoryForCausalLM(config).double()
    published.load_state_dict(published_names(model, weights))
    return published


def published_names(model: ModelConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, or gradients, by transformers' names."""
    groups, heads, head_dim = model.num_key_value_heads, model.num_attention_heads, model.head_dim
    found = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"][: model.vocab_size],
        "lm_head.weight": weights["output_layer.weight"][: model.vocab_size],
        "lm_head.logit_scale": weights["logit_scale"][: model.vocab_size],
    }
    for index in range(model.num_layers):
        own, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
        qkv = weights[f"{own}self_attention.linear_qkv.weight"].view(groups, heads // groups + 2, head_dim, -1)
        query, key, value = qkv.split([heads // groups, 1, 1], dim=1)
        gate, up = weights[f"{own}mlp.linear_fc1.weight"].chunk(2)
        found |= {
            f"{theirs}self_attn.q_proj.weight": query.flatten(0, 2),
            f"{theirs}self_attn.k_proj.weight": key.flatten(0, 2),
            f"{theirs}self_attn.v_proj.weight": value.flatten(0, 2),
            f"{theirs}self_attn.gate_proj.weight": weights[f"{own}self_attention.linear_gate.weight"],
            f"{theirs}self_attn.o_proj.weight": weights[f"{own}self_attention.linear_proj.weight"],
            f"{theirs}self_attn.sqk": weights[f"{own}self_attention.query_scale"],
            f"{theirs}self_attn.s_gate": weights[f"{own}self_attention.gate_scale"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": weights[f"{own}mlp.linear_fc2.weight"],
            f"{theirs}mlp.suv_gate": weights[f"{own}mlp.gate_scale"],
            f"{theirs}mlp.suv_up": weights[f"{own}mlp.up_scale"],
            f"{theirs}lambda_1": weights[f"{own}self_attn_bda.scale"],
            f"{theirs}lambda_2": weights[f"{own}mlp_bda.scale"],
        }
    return found
