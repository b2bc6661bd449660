"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.families.base import Defaults, Family, lacking
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.windows import SLIDING, read_layer_types, window_settings


class Mistral(Family):
    """A file without the field has a window of 4,096; later models say null, for none."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults = Defaults(num_key_value_heads=8, max_position_embeddings=131072)

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        width, num_layers = fields.optional_integer("sliding_window", 4096), sizes["num_layers"]
        kinds = read_layer_types(fields, num_layers=num_layers)
        if kinds is not None and set(kinds) != {SLIDING if width is not None else "full_attention"}:
            fields.faults.append("layer_types that differ from layer to layer, which transformers' Mistral ignores")
        windows = window_settings(width, tuple(range(num_layers)), num_layers=num_layers)
        return {"qk_norm": False, "qkv_bias": False, "output_bias": False, **windows}

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Family`."""
        return {"sliding_window": model.sliding_window or None}

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`."""
        return lacking(
            model,
            qk_norm=model.qk_norm,
            qkv_bias=model.qkv_bias,
            output_bias=model.output_bias,
            some_windowed=bool(model.windowed_layers) and len(model.windowed_layers) < model.num_layers,
        )
