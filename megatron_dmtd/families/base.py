"""What a family of decoders is: a `model_type` of Hugging Face, and the mapping between its settings and ours.

Most families are Llama with something added, so a family states its defaults and the parts that it adds; what all share is read
and written here. A new family is one file, entered in `families.FAMILIES`. A new part also needs a place in `architecture` and
wherever it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dmtd.architecture import DecoderSpec, Schedule
from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.decoder import decoder_of, method_of, schedule_of
from megatron_dmtd.cycle import Method
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.rope import read_rope, write_rope

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
#: Settings that are supported at one value only, and the spellings of that value.
_ONLY = {
    "mlp_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "hidden_act": ("silu",),
    "rope_interleaved": (False, None),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a `config.json` describes."""

    model: ModelConfig
    cycle: CycleConfig

    @property
    def decoder(self) -> DecoderSpec:
        """The layers."""
        return decoder_of(self.model)

    @property
    def method(self) -> Method:
        """The cycles, or vanilla."""
        return method_of(self.cycle)

    @property
    def schedule(self) -> Schedule:
        """The visits of the method to the layers."""
        return schedule_of(self.model, self.cycle)


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What transformers assumes for fields that a `config.json` omits."""

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    """None: one per query head."""
    head_dim: int | None = None
    """None: hidden size over query heads."""
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False


class Family:
    """One `model_type`. Subclasses define what it adds to Llama's decoder."""

    model_type: str
    architecture: str
    """Class in transformers."""
    defaults: Defaults

    # What a subclass changes.

    def read_parts(self, fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
        """Settings of `ModelConfig` for the parts that this family adds; `sizes` are those read so far."""
        raise NotImplementedError

    def read_cycle(self, fields: Fields, model: ModelConfig) -> CycleConfig:
        """The method: vanilla, unless the family has cycles."""
        return CycleConfig(variant="vanilla")

    def write_parts(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of `config.json` for the same parts."""
        raise NotImplementedError

    def lacks(self, model: ModelConfig) -> list[str]:
        """Settings of `model` that this family cannot express; empty if it can express the decoder."""
        raise NotImplementedError

    # What all share.

    def read(self, fields: Fields) -> ModelDescription:
        """What `fields` describe. Raises `ModelError` with everything that is unknown, contradictory or not computed here."""
        if fields.missing(*_REQUIRED):
            fields.finish(required="a config.json that states " + ", ".join(_REQUIRED))
        sizes = self._read_sizes(fields)
        for name, accepted in _ONLY.items():
            fields.require(name, accepted=accepted)
        experts = {name: fields.take(name) for name in _EXPERTS if fields.take(name)}
        if experts:
            fields.faults.append(f"mixture of experts ({experts})")
        if fields.take("quantization_config"):
            fields.faults.append("quantization_config")
        model = ModelConfig(**sizes | self.read_parts(fields, sizes))
        cycle = self.read_cycle(fields, model)
        fields.finish(required=f"a decoder of the family {self.model_type} all of whose settings are known here")
        return ModelDescription(model=model, cycle=cycle)

    def write(self, description: ModelDescription) -> dict[str, Any]:
        """The fields of a `config.json`, every setting written out."""
        model = description.model
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
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
            "tie_word_embeddings": model.tie_word_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            **write_rope(model.rope_theta, model.rope_scaling),
            **self.write_parts(model),
        }

    def _read_sizes(self, fields: Fields) -> dict[str, Any]:
        heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        defaults = self.defaults
        longest = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
        theta, scaling = read_rope(fields, default_theta=defaults.rope_theta, max_position_embeddings=longest)
        head_dim = fields.optional_integer("head_dim", defaults.head_dim)
        return {
            "family": self.model_type,
            "num_layers": fields.integer("num_hidden_layers"),
            "hidden_size": hidden_size,
            "intermediate_size": fields.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.optional_integer("num_key_value_heads", defaults.num_key_value_heads) or heads,
            "head_dim": head_dim if head_dim is not None else hidden_size // max(heads, 1),
            "vocab_size": fields.integer("vocab_size"),
            "max_position_embeddings": longest,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", defaults.tie_word_embeddings),
            "init_std": fields.number("initializer_range", 0.02),
        }


def lacking(model: ModelConfig, **found: bool) -> list[str]:
    """Descriptions of those named settings that are true of `model`: what a family cannot express."""
    words = {
        "qk_norm": "qk_norm true",
        "no_qk_norm": "qk_norm false",
        "qkv_bias": "qkv_bias true",
        "no_qkv_bias": "qkv_bias false",
        "output_bias": "output_bias true",
        "uneven_bias": f"qkv_bias {model.qkv_bias} with output_bias {model.output_bias}",
        "window": f"sliding_window {model.sliding_window}",
        "some_windowed": f"windowed_layers {list(model.windowed_layers)}",
        "no_window": "sliding_window 0",
    }
    return [words[name] for name, is_so in found.items() if is_so]


def beyond_llama(model: ModelConfig) -> list[str]:
    """Settings of `model` that only Dory can express, or nobody. A loop that runs once and adds to zeros is the plain stack."""
    has_loop = model.num_recurrent_layers > 0 and not (model.injection == "add" and model.num_loops == 1)
    parts = {
        "normalized true": model.normalized,
        f"num_loops {model.num_loops} with injection {model.injection}": has_loop,
        f"second_rope_theta {model.second_rope_theta}": bool(model.second_rope_layers),
    }
    return [name for name, is_there in parts.items() if is_there]
