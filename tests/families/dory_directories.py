"""Small Dory directories in the published layout, written here key by key and tensor by tensor."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: four blocks, of which two run in the loop
KINDS = ("sliding_attention", "mlp", "full_attention", "mlp") * 2
COMMON: dict[str, Any] = {
    "model_type": "dory",
    "architectures": ["DoryForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ngpt_alpha_init": 0.3,
    "attention_output_gate_logit_scale_init": None,
    "n_input_layers": 2,
    "n_recurrent_layers": 4,
    "n_output_layers": 2,
    "n_recurrent_loops": 3,
    "recurrent_kv_cache_mode": "per_loop",
    "max_position_embeddings": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
CURRENT: dict[str, Any] = {
    "head_dim": 16,
    "hidden_act": "silu",
    "initializer_range": 0.03,
    "layer_types": list(KINDS),
    "sliding_window": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0},
    },
}
OLDER: dict[str, Any] = {
    "dory_format_version": 1,
    "attention_head_dim": 16,
    "swa_head_dim": None,
    "hybrid_layer_pattern": "S-*-S-*-",
    "swa_window_size": 6,
    "rope_theta": 1e4,
    "rope_theta_2": 5e5,
    "rope_profile_layers": [1, 1, 2, 2, 1, 1, 2, 2],
    "no_rope_layers": [0] * 8,
    "partial_rotary_factor": 1.0,
    "partial_rotary_factor_2": 1.0,
    "init_method_std": 0.03,
    "mlp_hidden_act": "silu",
    "ngpt": True,
    "fngpt": True,
    "attention_output_gate": True,
    "ngpt_enable_final_norm": False,
    "initial_state": "input_copy",
    "input_transform": "residual",
    "output_transform": "replace",
    "mixer_type": None,
}
DIALECTS = {"both": COMMON | CURRENT | OLDER, "current": COMMON | CURRENT, "older": COMMON | OLDER}


def tensors(*, dtype: torch.dtype = torch.float32, unit_rows: bool = True) -> dict[str, torch.Tensor]:
    """Random weights; scales lie around their initial values, and no two are equal."""
    generator = torch.Generator().manual_seed(3)
    vocab, hidden, inner, query, key, std = 100, 32, 48, 64, 32, 0.03

    def matrix(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * spread / columns**0.5

    def scale(size: int, initial: float = std) -> torch.Tensor:
        return initial * (0.5 + torch.rand(size, generator=generator))

    table = matrix(vocab, hidden)
    found = {"backbone.embeddings.weight": torch.nn.functional.normalize(table) if unit_rows else table * 2}
    for index, kind in enumerate(KINDS):
        prefix = f"backbone.layers.{index}."
        if kind == "mlp":
            found |= {
                f"{prefix}mlp_alpha": scale(hidden),
                f"{prefix}mixer.gate_proj.weight": matrix(inner, hidden),
                f"{prefix}mixer.up_proj.weight": matrix(inner, hidden),
                f"{prefix}mixer.down_proj.weight": matrix(hidden, inner),
                f"{prefix}mixer.suv_gate": scale(inner, 1.0),
                f"{prefix}mixer.suv_up": scale(inner, 1.0),
            }
        else:
            found |= {
                f"{prefix}attn_alpha": scale(hidden),
                f"{prefix}mixer.q_proj.weight": matrix(query, hidden),
                f"{prefix}mixer.k_proj.weight": matrix(key, hidden),
                f"{prefix}mixer.v_proj.weight": matrix(key, hidden),
                f"{prefix}mixer.g_proj.weight": matrix(query, hidden),
                f"{prefix}mixer.o_proj.weight": matrix(hidden, query),
                f"{prefix}mixer.sqk": scale(query, 1.5 * std),
                f"{prefix}mixer.s_gate": scale(query),
            }
    found |= {"lm_head.weight": matrix(vocab, hidden, 20.0), "lm_head.logit_scale": scale(vocab)}
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def save_dory(directory: Path, *, dialect: str = "both", weights: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A model directory."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(DIALECTS[dialect] | changes))
    save_file(tensors() if weights is None else weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
