"""Rotary settings of a `config.json`: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of transformers 4."""

from __future__ import annotations

from typing import Any, Literal, cast

from megatron_dmtd.architecture import RopeScaling
from megatron_dmtd.families.fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: What each type reads in addition to `rope_type` and `rope_theta`; our names are Hugging Face's.
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
_REQUIRED = {"default": (), "linear": ("factor",), "llama3": _NUMBERS["llama3"], "yarn": ("factor",)}
_WITH_ORIGINAL = ("llama3", "yarn")


def read_rope(fields: Fields, *, default_theta: float, max_position_embeddings: int) -> tuple[float, RopeScaling]:
    """Base and scaling of the frequencies. Faults go to `fields`.

    As in transformers, `rope_scaling` has precedence over `rope_parameters`, and a base inside either of them over the file's own
    `rope_theta`.
    """
    outer_theta = fields.number("rope_theta", default_theta) if fields.take("rope_theta") is not None else default_theta
    newer, older = fields.table("rope_parameters"), fields.table("rope_scaling")
    if newer and older and _meaning(newer, outer_theta) != _meaning(older, outer_theta):
        fields.faults.append(f"rope_scaling {older} and rope_parameters {newer}, which contradict each other")
    name, table = ("rope_scaling", older) if older else ("rope_parameters", newer)
    inner = Fields(table, name=name)
    rope_type = inner.take("rope_type", table.get("type", "default"))
    inner.take("type")
    theta = inner.number("rope_theta", outer_theta)
    partial = inner.number("partial_rotary_factor", fields.take("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        fields.faults.append(f"partial_rotary_factor {partial}")
    if rope_type not in ROPE_TYPES:
        fields.faults.append(f"rope scaling {rope_type!r}")
        return theta, RopeScaling()
    original = fields.take("original_max_position_embeddings")
    scaling = _read_scaling(inner, rope_type, original=original or max_position_embeddings)
    fields.faults += inner.faults + inner.leftovers()
    return theta, scaling


def _meaning(table: dict[str, Any], outer_theta: float) -> dict[str, Any]:
    """The content of a table, independent of its spelling."""
    said = {name: value for name, value in table.items() if value is not None}
    said["rope_type"] = said.pop("rope_type", said.get("type", "default"))
    said.pop("type", None)
    return {"rope_theta": outer_theta} | said


def _read_scaling(inner: Fields, rope_type: str, *, original: int) -> RopeScaling:
    inner.missing(*_REQUIRED[rope_type])
    values: dict[str, Any] = {}
    for name in _NUMBERS[rope_type]:
        value = inner.optional_number(name)
        if value is not None:
            values[name] = value
    if rope_type in _WITH_ORIGINAL:
        values["original_max_position_embeddings"] = inner.integer("original_max_position_embeddings", original)
    else:
        inner.take("original_max_position_embeddings")  # a loader of transformers fills it in for every kind
    if rope_type == "yarn":
        values["truncate"] = inner.flag("truncate", True)
    return RopeScaling(rope_type=cast(Literal["default", "linear", "llama3", "yarn"], rope_type), **values)


def write_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """The fields of both spellings: transformers 5 reads the first, transformers 4 the others."""
    said: dict[str, Any] = {"rope_type": scaling.rope_type, "rope_theta": theta}
    for name in _NUMBERS[scaling.rope_type]:
        value = getattr(scaling, name)
        if value != getattr(RopeScaling(), name) or name in _REQUIRED[scaling.rope_type]:
            said[name] = value
    if scaling.rope_type in _WITH_ORIGINAL:
        said["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if not scaling.truncate:
        said["truncate"] = False
    fields = {"rope_parameters": said, "rope_theta": theta}
    return fields if scaling.rope_type == "default" else fields | {"rope_scaling": dict(said)}
