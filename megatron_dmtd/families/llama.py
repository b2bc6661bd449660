"""Llama: the decoder that the others add to."""

from __future__ import annotations

from typing import Any

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.families.base import Defaults, Family, lacking
from megatron_dmtd.families.fields import Fields


class Llama(Family):
    """Optionally with biases of all four attention projections."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    defaults = Defaults(max_position_embeddings=2048)

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        has_bias = fields.flag("attention_bias", False)
        return {"qk_norm": False, "qkv_bias": has_bias, "output_bias": has_bias}

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Family`."""
        return {"attention_bias": model.qkv_bias, "mlp_bias": False}

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`."""
        return lacking(
            model,
            qk_norm=model.qk_norm,
            uneven_bias=model.qkv_bias != model.output_bias,
            window=model.sliding_window > 0,
        )
