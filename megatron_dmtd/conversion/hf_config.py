"""Hugging Face's `config.json` and our `ModelConfig` and `CycleConfig`.

With `megatron_dmtd.hf` this is the only place of the foreign names. Reads `qwen3`, `llama` and `dmtdqwen3`. Anything that would
change the numbers and that our model lacks is refused by name, all at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.sections import Variant
from megatron_dmtd.config.validate import validate_cycle, validate_model
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import ConversionError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Defaults:
    """What transformers assumes where a `config.json` is silent."""

    qk_norm: bool
    num_key_value_heads: int | None
    """None: one per query head."""
    head_dim: int | None
    """None: hidden size over query heads."""
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False


_MODEL_TYPES = {
    "qwen3": _Defaults(qk_norm=True, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768),
    # what the runtimes of this family assume, which is not what Qwen3 does
    "dmtdqwen3": _Defaults(
        qk_norm=True,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    "llama": _Defaults(qk_norm=False, num_key_value_heads=None, head_dim=None, max_position_embeddings=2048),
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_CYCLE_FIELDS = ("mtp_horizon", "num_parallel_layers", "num_sequential_layers", "mask_token_id")
#: the variant of a config.json that names none: checkpoints older than the two fields are of it
_CYCLE_MODES = {"dmtd_history_mode": "shadow", "dmtd_block_attention": "causal"}


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}


def _refuse(faults: list[str], *, required: str) -> None:
    if faults:
        raise ConversionError(
            found="; ".join(faults),
            required=required,
            remedy="use a model without these, or correct config.json if it does not describe its weights",
        )


def _rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings, of transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`), as one mapping."""
    return {"rope_theta": fields.get("rope_theta")} | (fields.get("rope_scaling") or {}) | (fields.get("rope_parameters") or {})


def _unsupported(fields: Mapping[str, Any]) -> list[str]:
    """Every setting that our model has no counterpart for."""
    rope = _rope(fields)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    experts = {name: fields[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if fields.get(name)}
    checks = {
        f"rope scaling {rope_type!r}": rope_type != "default",
        f"partial_rotary_factor {partial}": partial != 1.0,
        "attention_bias true": bool(fields.get("attention_bias")),
        "mlp_bias true": bool(fields.get("mlp_bias")),
        f"attention_dropout {fields.get('attention_dropout')}": bool(fields.get("attention_dropout")),
        f"hidden_act {fields.get('hidden_act')!r}": fields.get("hidden_act", "silu") != "silu",
        "use_sliding_window true": bool(fields.get("use_sliding_window")),
        "sliding-window layers in layer_types": "sliding_attention" in (fields.get("layer_types") or ()),
        f"mixture of experts ({experts})": bool(experts),
        "quantization_config": bool(fields.get("quantization_config")),
        "num_thinking_layers, of DMTD without look-ahead blocks": fields.get("num_thinking_layers") is not None,
        "num_encoding_layers": bool(fields.get("num_encoding_layers")),
    }
    return [name for name, is_present in checks.items() if is_present]


def _model_config(fields: Mapping[str, Any], defaults: _Defaults) -> ModelConfig:
    heads = fields["num_attention_heads"]
    return ModelConfig(
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads") or defaults.num_key_value_heads or heads,
        head_dim=fields.get("head_dim") or defaults.head_dim or fields["hidden_size"] // heads,
        vocab_size=fields["vocab_size"],
        max_position_embeddings=fields.get("max_position_embeddings", defaults.max_position_embeddings),
        rope_theta=float(_rope(fields)["rope_theta"] or defaults.rope_theta),
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.get("tie_word_embeddings", defaults.tie_word_embeddings),
        qk_norm=fields.get("qk_norm", defaults.qk_norm),
        init_std=fields.get("initializer_range", 0.02),
    )


def _cycle_config(fields: Mapping[str, Any]) -> CycleConfig:
    missing = [name for name in _CYCLE_FIELDS if name not in fields]
    _refuse([f"no {name}" for name in missing], required="the cycle fields " + ", ".join(_CYCLE_FIELDS))
    history, block_attention = (fields.get(name) or default for name, default in _CYCLE_MODES.items())
    names = {value: name for name, value in VARIANTS.items()}
    split = fields["num_parallel_layers"] + fields["num_sequential_layers"]
    faults = []
    if (history, block_attention) not in names:
        faults.append(f"dmtd_history_mode {history!r} with dmtd_block_attention {block_attention!r}")
    if split != fields["num_hidden_layers"]:
        faults.append(f"num_parallel_layers + num_sequential_layers = {split}, num_hidden_layers = {fields['num_hidden_layers']}")
    _refuse(faults, required="shadow or real history, causal or bidirectional blocks, and layers that add up")
    return CycleConfig(
        variant=cast(Variant, names[history, block_attention]),
        num_parallel_layers=fields["num_parallel_layers"],
        cycle_length=fields["mtp_horizon"],
        mask_token_id=fields["mask_token_id"],
    )


def from_hf_config(fields: Mapping[str, Any]) -> tuple[ModelConfig, CycleConfig]:
    """The model and, for `dmtdqwen3`, its cycles (else `vanilla`) that the fields of a `config.json` describe.

    Raises `ConversionError` for what we cannot represent, `ConfigError` for shapes that contradict themselves.
    """
    model_type = str(fields.get("model_type"))
    if model_type not in _MODEL_TYPES:
        _refuse([f"model_type {model_type!r}"], required="a model_type among " + ", ".join(_MODEL_TYPES))
    missing = [f"no {name}" for name in _REQUIRED if fields.get(name) is None]
    _refuse(missing, required="a config.json that states " + ", ".join(_REQUIRED))
    _refuse(_unsupported(fields), required="an ordinary Qwen3-like or Llama-like decoder")
    model = _model_config(fields, _MODEL_TYPES[model_type])
    validate_model(model)
    cycle = _cycle_config(fields) if model_type == "dmtdqwen3" else CycleConfig(variant="vanilla")
    validate_cycle(cycle, model)
    return model, cycle


def read_hf_fields(directory: str | Path) -> dict[str, Any]:
    """The fields of `directory`/config.json. Raises `ConversionError` if it is absent or no JSON object."""
    path = Path(directory) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConversionError(
            found=f"{path}: {error}", required="a Hugging Face model directory", remedy="check the path"
        ) from error
    if not isinstance(fields, dict):
        raise ConversionError(found=f"{path} holds no object", required="a model's config.json", remedy="check the path")
    return fields


def _decoder_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.rms_norm_eps,
        # Both spellings: transformers 5 reads the first, transformers 4 the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def to_hf_config(model: ModelConfig, cycle: CycleConfig) -> dict[str, Any]:
    """The fields of a `config.json` for `model`: `dmtdqwen3`, or for a vanilla cycle `qwen3` or `llama` (by its q/k norm)."""
    fields = _decoder_fields(model)
    if cycle.is_vanilla:
        if not model.qk_norm:
            return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False} | fields
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | fields | _NO_WINDOW
    return (
        {"model_type": "dmtdqwen3", "architectures": ["DMTDQwen3ForCausalLM"]}
        | fields
        | _NO_WINDOW
        | {
            "qk_norm": model.qk_norm,
            "mtp_horizon": cycle.cycle_length,
            "num_parallel_layers": cycle.num_parallel_layers,
            "num_sequential_layers": model.num_layers - cycle.num_parallel_layers,
            "mask_token_id": cycle.mask_token_id,
            "dmtd_history_mode": cycle.history,
            "dmtd_block_attention": cycle.block_attention,
        }
    )
