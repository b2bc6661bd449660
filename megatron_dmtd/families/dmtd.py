"""Parallel DMTD: a decoder of any family here with cycles, as the published checkpoints of the family spell it.

`hf/` holds the model code that exports of this `model_type` carry.
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
#: the variant of a config.json that names none: checkpoints older than the two fields are of it
_CYCLE_MODES = {"dmtd_history_mode": "shadow", "dmtd_block_attention": "causal"}
#: groups of layers of older methods, which have no look-ahead blocks
_OTHER_METHODS = ("num_encoding_layers", "num_thinking_layers", "num_decoding_layers")


class DMTD(Family):
    """Every part that any family has, and cycles."""

    model_type = "dmtdqwen3"
    architecture = "DMTDQwen3ForCausalLM"
    # what the runtimes of this family assume, which is not what Qwen3 does
    defaults = Defaults(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    )

    def read(self, fields: Fields) -> ModelDescription:
        """See `Family`. The vanilla twin of such a model is exported as whatever family has its parts."""
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
        """See `Family`. The output bias is named only where it is not as the others, which Qwen3 has no word for."""
        uneven = {"attention_output_bias": model.output_bias} if model.output_bias != model.qkv_bias else {}
        return {"attention_bias": model.qkv_bias, **uneven, **write_windows(model)}

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`: it has words for everything."""
        return []
