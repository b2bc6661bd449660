"""Sliding windows as Qwen2 and Qwen3 spell them: a switch, a width, and the first layer that has one or a list of kinds."""

from __future__ import annotations

from typing import Any

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.families.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
#: what transformers assumes if a file does not say
_DEFAULT_WINDOW, _DEFAULT_FIRST = 4096, 28


def read_windows(fields: Fields, *, num_layers: int) -> dict[str, Any]:
    """`sliding_window` and `windowed_layers` of `ModelConfig`."""
    is_on = fields.flag("use_sliding_window", False)
    width = fields.optional_integer("sliding_window", _DEFAULT_WINDOW) if is_on else None
    fields.take("sliding_window")
    first = fields.optional_integer("max_window_layers", _DEFAULT_FIRST)
    kinds = read_layer_types(fields, num_layers=num_layers)
    if kinds is None:
        kinds = [SLIDING if width is not None and layer >= (first or 0) else FULL for layer in range(num_layers)]
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if windowed and width is None:
        fields.faults.append("sliding_attention in layer_types without use_sliding_window and a sliding_window")
    return window_settings(width if windowed else None, windowed, num_layers=num_layers)


def read_layer_types(fields: Fields, *, num_layers: int) -> list[str] | None:
    """The kind of each layer; None if the file does not list them."""
    kinds = fields.strings("layer_types")
    if kinds is None:
        return None
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        fields.faults.append(f"layer_types with {', '.join(unknown)}")
    if len(kinds) != num_layers:
        fields.faults.append(f"{len(kinds)} layer_types for {num_layers} layers")
    return kinds


def window_settings(width: int | None, windowed: tuple[int, ...], *, num_layers: int) -> dict[str, Any]:
    """The same as settings of ours: no list where all layers are alike."""
    if width is None:
        return {"sliding_window": 0, "windowed_layers": ()}
    return {"sliding_window": width, "windowed_layers": () if len(windowed) == num_layers else windowed}


def windowed_layers(model: ModelConfig) -> tuple[int, ...]:
    """The layers of `model` that have a window."""
    if not model.sliding_window:
        return ()
    return model.windowed_layers or tuple(range(model.num_layers))


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json`. Without windows `layer_types` is left out, as older readers expect."""
    windowed = windowed_layers(model)
    if not windowed:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = [SLIDING if layer in windowed else FULL for layer in range(model.num_layers)]
    # The first windowed layer, for readers that know no list of kinds. They agree where windows are the last layers.
    return {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "max_window_layers": windowed[0],
        "layer_types": kinds,
    }
