"""Parallel DMTD: a decoder with the parts of any family here, and cycles, in the spelling of the published checkpoints.

`hf/` holds the model code that travels with exports of this `model_type`.
"""

from __future__ import annotations

from typing import Any, cast

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.sections import Variant
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.families.base import Defaults, Family, ModelDescription
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.windows import read_windows, write_windows

_CYCLE_FIELDS = ("mtp_horizon", "num_parallel_layers", "num_sequential_layers", "mask_token_id")
#: the variant of a config.json that names none, as in checkpoints older than these two fields
_CYCLE_MODES = {"dmtd_history_mode": "shadow", "dmtd_block_attention": "causal"}
#: fields of older methods without look-ahead blocks
_OTHER_METHODS = ("num_encoding_layers", "num_thinking_layers", "num_decoding_layers")


class DMTD(Family):
    """Every part that any family has, and cycles."""

    model_type = "dmtdqwen3"
    architecture = "DMTDQwen3ForCausalLM"
    # what the runtimes of this family assume; it differs from Qwen3
    defaults = Defaults(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    )

    def read(self, fields: Fields) -> ModelDescription:
        """See `Family`. A vanilla export of such a model belongs to whichever family has its parts."""
        named = [name for name in _OTHER_METHODS if fields.take(name)]
        if named:
            fields.faults.append(f"{', '.join(named)}, of DMTD without look-ahead blocks")
        return super().read(fields)

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        has_bias = fields.flag("attention_bias", False)
        return {
            "family": "auto",
            "qk_norm": fields.flag("qk_norm", True),
            "qkv_bias": has_bias,
            "output_bias": fields.flag("attention_output_bias", has_bias),
            **read_windows(fields, num_layers=sizes["num_layers"]),
        }

    def read_cycle(self, fields: Fields, model: ModelConfig) -> CycleConfig:
        """See `Family`."""
        if fields.missing(*_CYCLE_FIELDS):
            fields.finish(required="the cycle fields " + ", ".join(_CYCLE_FIELDS))
        history, block_attention = (fields.take(name) or default for name, default in _CYCLE_MODES.items())
        names = {value: name for name, value in VARIANTS.items()}
        if (history, block_attention) not in names:
            fields.faults.append(f"dmtd_history_mode {history!r} with dmtd_block_attention {block_attention!r}")
        parallel, sequential = fields.integer("num_parallel_layers"), fields.integer("num_sequential_layers")
        if parallel + sequential != model.num_layers:
            fields.faults.append(
                f"num_parallel_layers + num_sequential_layers = {parallel + sequential}, num_hidden_layers = {model.num_layers}"
            )
        return CycleConfig(
            variant=cast(Variant, names.get((history, block_attention), "causal-norefresh")),
            num_parallel_layers=parallel,
            cycle_length=fields.integer("mtp_horizon"),
            mask_token_id=fields.integer("mask_token_id"),
        )

    def write(self, description: ModelDescription) -> dict[str, Any]:
        """See `Family`."""
        cycle, model = description.cycle, description.model
        return super().write(description) | {
            "qk_norm": model.qk_norm,
            "mtp_horizon": cycle.cycle_length,
            "num_parallel_layers": cycle.num_parallel_layers,
            "num_sequential_layers": model.num_layers - cycle.num_parallel_layers,
            "mask_token_id": cycle.mask_token_id,
            "dmtd_history_mode": cycle.history,
            "dmtd_block_attention": cycle.block_attention,
        }

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Family`. The output bias is written only if it differs from the others, for which Qwen3 has no field."""
        uneven = {"attention_output_bias": model.output_bias} if model.output_bias != model.qkv_bias else {}
        return {"attention_bias": model.qkv_bias, **uneven, **write_windows(model)}

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`. This one can express everything."""
        return []
