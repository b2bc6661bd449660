"""Dory: normalized decoders whose middle layers run in a loop (arXiv 2611.03998), in both dialects of their `config.json`.

The current dialect (`layer_types`, `rope_parameters`, `initializer_range`) is what transformers and vLLM read; the older one
(`hybrid_layer_pattern`, `rope_profile_layers`, `init_method_std`) is what llama.cpp's converter reads. A file may have either or
both. Where both say something, they must agree; what only the current dialect could say and does not, and for which its readers
assume different values, is refused. Written are both, every key of each.

Layers are counted in sublayers, attention and feed-forward in turns: two for each of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.families.base import Defaults, Family, ModelDescription
from megatron_dmtd.families.fields import Fields
from megatron_dmtd.families.windows import FULL, SLIDING, windowed_layers

MLP = "mlp"
_LETTERS = {"S": SLIDING, "*": FULL, "-": MLP}
_CURRENT = ("layer_types", "rope_parameters", "initializer_range", "head_dim", "sliding_window", "hidden_act")
_OLDER = (
    "dory_format_version", "hybrid_layer_pattern", "attention_head_dim", "swa_window_size", "init_method_std",
    "rope_profile_layers", "mlp_hidden_act",
)  # fmt: skip
#: Settings that are supported at one value only. The first value is written.
_ONLY: dict[str, tuple[Any, ...]] = {
    "dory_format_version": (1,),
    "ngpt": (True,),
    "fngpt": (True,),
    "attention_output_gate": (True,),
    "ngpt_enable_final_norm": (False,),
    "initial_state": ("input_copy",),
    "input_transform": ("residual",),
    "output_transform": ("replace",),
    "mixer_type": (None,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_hidden_act": ("silu",),
    "attention_dropout": (0.0, 0, None),
}
_SIZES = {
    "vocab_size": 131072, "hidden_size": 2560, "intermediate_size": 7168, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
_EPS = 1e-6
_DEFAULT_HEAD_DIM, _DEFAULT_WINDOW, _DEFAULT_STD, _DEFAULT_THETA, _DEFAULT_STEP = 256, 1024, 0.02, 10_000.0, 0.05


@dataclass(kw_only=True, slots=True)
class _Stated:
    """What one dialect says; None where it says nothing."""

    kinds: list[str] | None = None
    """Of each sublayer."""
    thetas: list[float] | None = None
    """Rotary base of each layer."""
    head_dim: int | None = None
    window: int | None = None
    init_std: float | None = None


class Dory(Family):
    """A normalized decoder, in which `initializer_range` is part of the model: it is the unit of all learned scales."""

    model_type = "dory"
    architecture = "DoryForCausalLM"
    defaults = Defaults(max_position_embeddings=8192, num_key_value_heads=4, head_dim=256)

    def read(self, fields: Fields) -> ModelDescription:
        """See `Family`."""
        is_current, is_older = (any(name in fields for name in names) for names in (_CURRENT, _OLDER))
        sizes: dict[str, Any] = {name: fields.integer(name, default) for name, default in _SIZES.items()}
        count = fields.integer("num_hidden_layers")
        for name, accepted in _ONLY.items():
            fields.require(name, accepted=accepted)
        if fields.flag("tie_word_embeddings", False):
            fields.faults.append("tie_word_embeddings true")
        if fields.take("rms_norm_eps", _EPS) != _EPS:
            fields.faults.append(f"rms_norm_eps {fields.take('rms_norm_eps')}")
        if fields.take("quantization_config"):
            fields.faults.append("quantization_config")
        older = _read_older(fields, count) if is_older else _Stated()
        current = _read_current(fields, count) if is_current or not is_older else _Stated()
        stated = _agreed(fields, current, older)
        kinds = _blocks(fields, stated.kinds or [])
        model = ModelConfig(
            **sizes,
            family=self.model_type,
            num_layers=len(kinds),
            head_dim=stated.head_dim or _DEFAULT_HEAD_DIM,
            rms_norm_eps=_EPS,
            tie_word_embeddings=False,
            qk_norm=True,
            normalized=True,
            init_std=stated.init_std or _DEFAULT_STD,
            step_init=_positive(fields, "ngpt_alpha_init", _DEFAULT_STEP),
            attention_gate_init=_gate_init(fields),
            **_rope_settings(fields, stated.thetas or []),
            **_window_settings(fields, kinds, stated.window if is_older or "sliding_window" in fields else _DEFAULT_WINDOW),
            **_loop_settings(fields, len(kinds), in_sublayers=MLP in (stated.kinds or []), is_older=is_older),
        )
        fields.finish(required="a Dory decoder all of whose settings are known here")
        return ModelDescription(model=model, cycle=CycleConfig(variant="vanilla"))

    def write(self, description: ModelDescription) -> dict[str, Any]:
        """See `Family`. Every key of both dialects, each complete by itself."""
        model = description.model
        windowed, count = windowed_layers(model), 2 * model.num_layers
        kinds = [SLIDING if layer in windowed else FULL for layer in range(model.num_layers)]
        thetas = _thetas(model)
        by_kind = {kind: thetas[layer] for layer, kind in enumerate(kinds)}
        profiles = [2 if layer in model.second_rope_layers else 1 for layer in range(model.num_layers)]
        letters = {kind: letter for letter, kind in _LETTERS.items()}
        inner = model.num_recurrent_layers or model.num_layers
        before = model.num_input_layers if model.num_recurrent_layers else 0
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            **{name: getattr(model, name) for name in _SIZES},
            "num_hidden_layers": count,
            "n_input_layers": 2 * before,
            "n_recurrent_layers": 2 * inner,
            "n_output_layers": count - 2 * (before + inner),
            "n_recurrent_loops": model.num_loops,
            "recurrent_kv_cache_mode": model.recurrent_kv_cache_mode,
            "ngpt_alpha_init": model.step_init,
            "attention_output_gate_logit_scale_init": model.attention_gate_init or None,
            "tie_word_embeddings": False,
            "use_cache": True,
            **{name: accepted[0] for name, accepted in _ONLY.items()},
            # the current dialect
            "head_dim": model.head_dim,
            "layer_types": [kind for attention in kinds for kind in (attention, MLP)],
            "sliding_window": model.sliding_window or None,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}
                for kind, theta in by_kind.items()
            },
            "initializer_range": model.init_std,
            # the older one
            "attention_head_dim": model.head_dim,
            "swa_head_dim": model.head_dim,
            "swa_num_attention_heads": model.num_attention_heads,
            "swa_num_key_value_heads": model.num_key_value_heads,
            "hybrid_layer_pattern": "".join(letters[kind] + letters[MLP] for kind in kinds),
            "swa_window_size": model.sliding_window or None,
            "rope_theta": model.rope_theta,
            "rope_theta_2": model.second_rope_theta or model.rope_theta,
            "rope_profile_layers": [profile for profile in profiles for _ in range(2)],
            "no_rope_layers": [0] * count,
            "partial_rotary_factor": 1.0,
            "partial_rotary_factor_2": 1.0,
            "init_method_std": model.init_std,
        }

    def lacks(self, model: ModelConfig) -> list[str]:
        """See `Family`."""
        if not model.normalized:
            return ["normalized false"]
        kinds = [layer in windowed_layers(model) for layer in range(model.num_layers)]
        bases = {(kind, theta) for kind, theta in zip(kinds, _thetas(model), strict=True)}
        wrong = {
            f"rms_norm_eps {model.rms_norm_eps}": model.rms_norm_eps != _EPS,
            f"rope_scaling {model.rope_scaling.rope_type}": model.rope_scaling.rope_type != "default",
            "two rotary bases among layers of one kind": len(bases) > len(set(kinds)),
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]


def _thetas(model: ModelConfig) -> list[float]:
    return [
        model.second_rope_theta if layer in model.second_rope_layers else model.rope_theta for layer in range(model.num_layers)
    ]


# The current dialect.


def _read_current(fields: Fields, count: int) -> _Stated:
    """Its settings. A file that has no key of the older dialect must state those for which readers assume different values."""
    kinds = fields.strings("layer_types")
    if kinds is None:
        return _Stated(head_dim=fields.optional_integer("head_dim"), window=fields.optional_integer("sliding_window"))
    unknown = sorted(set(kinds) - {FULL, SLIDING, MLP})
    if unknown:
        fields.faults.append(f"layer_types with {', '.join(unknown)}")
    if len(kinds) != count:
        fields.faults.append(f"{len(kinds)} layer_types for {count} layers")
    attention = [kind for kind in kinds if kind != MLP]
    rope = fields.table("rope_parameters")
    thetas = {kind: _theta(fields, kind, rope.get(kind)) for kind in dict.fromkeys(attention)} if rope else None
    strange = sorted(set(rope) - {FULL, SLIDING})
    if strange:
        fields.faults.append(f"rope_parameters for {', '.join(strange)}")
    std = fields.optional_number("initializer_range")
    return _Stated(
        kinds=kinds,
        thetas=None if thetas is None else [thetas[kind] for kind in attention],
        head_dim=fields.optional_integer("head_dim"),
        window=fields.optional_integer("sliding_window"),
        init_std=_above_zero(fields, "initializer_range", std),
    )


def _theta(fields: Fields, kind: str, table: Any) -> float:
    name = f"rope_parameters.{kind}"
    if not isinstance(table, dict):
        fields.faults.append(f"no {name}" if table is None else f"{name} {table!r}, which is not an object")
        return _DEFAULT_THETA
    inner = Fields(table, name=name)
    rope_type, partial = inner.take("rope_type", "default"), inner.take("partial_rotary_factor", 1.0)
    if rope_type != "default":
        inner.faults.append(f"{name}.rope_type {rope_type!r}")
    if partial not in (1, 1.0, None):
        inner.faults.append(f"{name}.partial_rotary_factor {partial}")
    theta = inner.number("rope_theta")
    if theta <= 0:
        inner.faults.append(f"{name}.rope_theta {theta}")
    fields.faults += inner.faults + inner.leftovers()
    return theta


# The older dialect.


def _read_older(fields: Fields, count: int) -> _Stated:
    pattern = fields.take("hybrid_layer_pattern", "S-S-S-*-" * (count // 8) if count % 8 == 0 else None)
    if not isinstance(pattern, str):
        fields.faults.append(f"hybrid_layer_pattern {pattern!r}, which is not a text")
        pattern = ""
    unknown = sorted(set(pattern) - set(_LETTERS))
    if unknown:
        fields.faults.append(f"hybrid_layer_pattern with {', '.join(map(repr, unknown))}")
    if len(pattern) != count:
        fields.faults.append(f"hybrid_layer_pattern of {len(pattern)} letters for {count} layers")
    head_dim = fields.integer("attention_head_dim", _DEFAULT_HEAD_DIM)
    for name, expected in (
        ("swa_head_dim", head_dim),
        ("swa_num_attention_heads", fields.take("num_attention_heads", _SIZES["num_attention_heads"])),
        ("swa_num_key_value_heads", fields.take("num_key_value_heads", _SIZES["num_key_value_heads"])),
    ):
        if fields.take(name) not in (None, expected):
            fields.faults.append(f"{name} {fields.take(name)} with {expected} in layers without a window")
    kinds = [_LETTERS.get(letter, MLP) for letter in pattern]
    return _Stated(
        kinds=kinds,
        thetas=_older_thetas(fields, kinds, count),
        head_dim=head_dim,
        window=fields.optional_integer("swa_window_size", _DEFAULT_WINDOW),
        init_std=_positive(fields, "init_method_std", _DEFAULT_STD),
    )


def _older_thetas(fields: Fields, kinds: list[str], count: int) -> list[float]:
    first = _positive(fields, "rope_theta", _DEFAULT_THETA)
    second = first if fields.take("rope_theta_2") is None else _positive(fields, "rope_theta_2", first)
    for name in ("partial_rotary_factor", "partial_rotary_factor_2"):
        fields.require(name, accepted=(1, 1.0, None))
    profiles = _numbers(fields, "rope_profile_layers", count, default=1, accepted=(1, 2))
    _numbers(fields, "no_rope_layers", count, default=0, accepted=(0,))
    return [second if profile == 2 else first for kind, profile in zip(kinds, profiles, strict=False) if kind != MLP]


def _numbers(fields: Fields, name: str, count: int, *, default: int, accepted: tuple[int, ...]) -> list[int]:
    """A number for each sublayer."""
    found = fields.take(name)
    if found is None:
        return [default] * count
    if not isinstance(found, list) or len(found) != count:
        size = f" of {len(found)} numbers" if isinstance(found, list) else f" {found!r}"
        fields.faults.append(f"{name}{size} for {count} layers")
        return [default] * count
    wrong = [value for value in found if isinstance(value, bool) or value not in accepted]
    if wrong:
        fields.faults.append(f"{name} with {wrong[0]!r}")
    return found


# Both.


def _agreed(fields: Fields, current: _Stated, older: _Stated) -> _Stated:
    names = {
        "kinds": ("layer_types", "hybrid_layer_pattern"),
        "thetas": ("rope_parameters", "rope_theta and rope_profile_layers"),
        "head_dim": ("head_dim", "attention_head_dim"),
        "window": ("sliding_window", "swa_window_size"),
        "init_std": ("initializer_range", "init_method_std"),
    }
    agreed = _Stated()
    for field, (new, old) in names.items():
        one, other = getattr(current, field), getattr(older, field)
        if field == "kinds" and one is not None and MLP not in one:
            one = [kind for attention in one for kind in (attention, MLP)]
        if one is not None and other is not None and one != other:
            fields.faults.append(f"{new} and {old}, which contradict each other")
        setattr(agreed, field, other if one is None else one)
    for field in ("kinds", "thetas", "init_std"):
        if getattr(agreed, field) is None and not fields.faults:
            fields.faults.append(f"no {names[field][0]}, for which readers of this format assume different values")
    if current.kinds is not None and MLP not in current.kinds:
        agreed.kinds = current.kinds
    return agreed


def _blocks(fields: Fields, kinds: list[str]) -> list[str]:
    """The kind of attention of each of our layers."""
    if MLP not in kinds:
        return kinds  # as transformers has them in memory
    attention, feed_forward = kinds[::2], kinds[1::2]
    if len(kinds) % 2 or MLP in attention or set(feed_forward) != {MLP}:
        fields.faults.append("layers in which attention and mlp do not take turns")
    return attention[: len(feed_forward)]


def _rope_settings(fields: Fields, thetas: list[float]) -> dict[str, Any]:
    different = list(dict.fromkeys(thetas)) or [_DEFAULT_THETA]
    if len(different) > 2:
        fields.faults.append(f"{len(different)} rotary bases")
    second = different[1] if len(different) > 1 else 0.0
    layers = tuple(layer for layer, theta in enumerate(thetas) if theta == second)
    return {"rope_theta": different[0], "second_rope_theta": second, "second_rope_layers": layers if second else ()}


def _window_settings(fields: Fields, kinds: list[str], window: int | None) -> dict[str, Any]:
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if not windowed:
        return {"sliding_window": 0, "windowed_layers": ()}
    named_null = [name for name in ("sliding_window", "swa_window_size") if name in fields and fields.take(name) is None]
    if named_null or window is None or window <= 0:
        fields.faults.append(f"sliding_attention with a sliding_window of {'null' if named_null else window}")
        return {"sliding_window": 0, "windowed_layers": ()}
    return {"sliding_window": window, "windowed_layers": () if len(windowed) == len(kinds) else windowed}


def _loop_settings(fields: Fields, num_layers: int, *, in_sublayers: bool, is_older: bool) -> dict[str, Any]:
    unit = 2 if in_sublayers else 1
    groups = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
    if not is_older and fields.missing("n_recurrent_loops", *groups):
        return {}
    before, after = fields.integer(groups[0], 0), fields.integer(groups[2], 0)
    inner = fields.integer(groups[1], unit * num_layers - before - after)
    if before + inner + after != unit * num_layers or min(before, inner, after) < 0:
        fields.faults.append(f"{before} input, {inner} recurrent and {after} output layers of {unit * num_layers}")
    if before % unit or inner % unit:
        fields.faults.append(f"groups of {before}, {inner} and {after} layers, which part an attention from its mlp")
    loops = fields.integer("n_recurrent_loops", 1)
    if loops < 1 or (loops > 1 and not inner):
        fields.faults.append(f"n_recurrent_loops {loops} of {inner} layers")
    mode = fields.take("recurrent_kv_cache_mode", "per_loop")
    if mode not in ("per_loop", "last_loop"):
        fields.faults.append(f"recurrent_kv_cache_mode {mode!r}")
    return {
        "num_input_layers": before // unit,
        "num_recurrent_layers": inner // unit,
        "num_loops": loops,
        "recurrent_kv_cache_mode": mode,
        "injection": "residual",
    }


def _gate_init(fields: Fields) -> float:
    name = "attention_output_gate_logit_scale_init"
    return 0.0 if fields.take(name) is None else _positive(fields, name, 0.0)


def _positive(fields: Fields, name: str, default: float) -> float:
    return _above_zero(fields, name, fields.number(name, default)) or default


def _above_zero(fields: Fields, name: str, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        fields.faults.append(f"{name} {value}")
    return value
