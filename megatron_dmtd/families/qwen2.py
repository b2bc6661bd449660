"""Qwen2 and Qwen2.5: Llama with biases of the query, key and value projections."""

from __future__ import annotations

from typing import Any

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.families.base import Defaults, Family, lacking
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.windows import read_windows, write_windows


class Qwen2(Family):
    """Always with the biases, optionally with sliding windows."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults = Defaults(num_key_value_heads=32, max_position_embeddings=32768)

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        windows = read_windows(fields, num_layers=sizes["num_layers"])
        return {"qk_norm": False, "qkv_bias": True, "output_bias": False, **windows}

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Family`."""
        return write_windows(model)

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`."""
        return lacking(model, qk_norm=model.qk_norm, no_qkv_bias=not model.qkv_bias, output_bias=model.output_bias)
