"""Qwen3: Llama with a norm of each query and key head."""

from __future__ import annotations

from typing import Any

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.families.base import Defaults, Family, lacking
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.windows import read_windows, write_windows


class Qwen3(Family):
    """Optionally with biases of all four attention projections, and with sliding windows."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults = Defaults(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768)

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        has_bias = fields.flag("attention_bias", False)
        windows = read_windows(fields, num_layers=sizes["num_layers"])
        return {"qk_norm": True, "qkv_bias": has_bias, "output_bias": has_bias, **windows}

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Family`."""
        return {"attention_bias": model.qkv_bias, **write_windows(model)}

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`."""
        return lacking(model, no_qk_norm=not model.qk_norm, uneven_bias=model.qkv_bias != model.output_bias)
