"""Tiny models of transformers with the parts that decoders differ in, and their tensors by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_dmtd.architecture import RopeScaling
from tests.support.tiny import VOCAB

LAYERS = 4
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA3 = {"factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model of transformers, and the same settings for the trainer."""

    model: Any
    fields: dict[str, Any]
    """Beyond `SHAPE`."""
    settings: dict[str, Any]
    """Fields of ModelConfig."""
    windows: tuple[int | None, ...] = (None,) * LAYERS

    def build(self, *, seed: int = 0) -> Any:
        """The model with random weights and biases, float64, whose logits spread widely."""
        model_class, config_class = self.model
        rope = {"rope_theta": 1e4, "rope_type": "default"} | self.fields.get("rope_parameters", {})
        fields = SHAPE | self.fields | {"rope_parameters": rope, "attn_implementation": "eager"}
        model = model_class(config_class(**fields)).double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                is_norm = name.endswith("norm.weight")
                parameter.copy_(1 + 0.1 * noise if is_norm else (0.5 if parameter.dim() == 1 else 0.3) * noise)
        return model


QWEN2, QWEN3 = (Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)
MISTRAL, LLAMA = (MistralForCausalLM, MistralConfig), (LlamaForCausalLM, LlamaConfig)
FAMILIES = {
    "qwen2": Family(model=QWEN2, fields={"use_sliding_window": False}, settings={"qk_norm": False, "qkv_bias": True}),
    "qwen2-windows": Family(
        model=QWEN2,
        fields={"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2},
        settings={"qk_norm": False, "qkv_bias": True, "sliding_window": 6, "windowed_layers": (1, 3)},
        windows=(None, 6, None, 6),
    ),
    "mistral": Family(
        model=MISTRAL, fields={"sliding_window": 6}, settings={"qk_norm": False, "sliding_window": 6}, windows=(6,) * LAYERS
    ),
    "llama-biases": Family(
        model=LLAMA, fields={"attention_bias": True}, settings={"qk_norm": False, "qkv_bias": True, "output_bias": True}
    ),
    "llama-llama3": Family(
        model=LLAMA,
        fields={"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        settings={"qk_norm": False, "rope_scaling": RopeScaling(rope_type="llama3", **LLAMA3)},
    ),
    "qwen3-yarn": Family(
        model=QWEN3,
        fields={"rope_parameters": {"rope_type": "yarn", **YARN}},
        settings={"rope_scaling": RopeScaling(rope_type="yarn", **YARN)},
    ),
    "qwen3-linear": Family(
        model=QWEN3,
        fields={"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        settings={"rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
    ),
}


def megatron_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors (or their gradients) of a whole untied model by Megatron's names: q, k, v by groups, gate and up one matrix."""
    groups, width, heads = SHAPE["num_key_value_heads"], SHAPE["head_dim"], SHAPE["num_attention_heads"]
    assert isinstance(groups, int) and isinstance(width, int) and isinstance(heads, int)

    def joined(layer: str, end: str) -> torch.Tensor:
        parts = [tensors[f"{layer}.self_attn.{name}_proj.{end}"].unflatten(0, (groups, -1)) for name in "qkv"]
        return torch.cat(parts, dim=1).flatten(0, 1)

    padded = torch.nn.functional.pad
    found = {
        "embedding.word_embeddings.weight": padded(tensors["model.embed_tokens.weight"], (0, 0, 0, 128 - VOCAB)),
        "output_layer.weight": padded(tensors["lm_head.weight"], (0, 0, 0, 128 - VOCAB)),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    for index in range(LAYERS):
        theirs, ours = f"model.layers.{index}", f"decoder.layers.{index}"
        named = {
            "input_layernorm.weight": "input_layernorm.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        }
        found |= {f"{ours}.{a}": tensors[f"{theirs}.{b}"] for a, b in named.items() if f"{theirs}.{b}" in tensors}
        found[f"{ours}.mlp.linear_fc1.weight"] = torch.cat([tensors[f"{theirs}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
        for end in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{end}" in tensors:
                found[f"{ours}.self_attention.linear_qkv.{end}"] = joined(theirs, end)
    return found
