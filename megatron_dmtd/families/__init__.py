"""Families of decoders: the only reader and writer of Hugging Face's `config.json`, for converter, trainer and engine alike.

    description = read_directory("Qwen3-4B")     # settings, decoder, method and schedule
    fields = write_fields(description)            # and back

Tensor names are `families.names`. Nothing here reads weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.config.validate import validate_cycle, validate_model
from megatron_dmtd.errors import ModelError, Refusal
from megatron_dmtd.families.base import Family, ModelDescription, beyond_llama
from megatron_dmtd.families.dmtd import DMTD
from megatron_dmtd.families.dory import Dory
from megatron_dmtd.families.fields import Fields, refuse
from megatron_dmtd.families.llama import Llama
from megatron_dmtd.families.mistral import Mistral
from megatron_dmtd.families.names import hf_name, hf_tensors
from megatron_dmtd.families.qwen2 import Qwen2
from megatron_dmtd.families.qwen3 import Qwen3
from megatron_dmtd.infra.json_files import read_object

__all__ = [
    "FAMILIES",
    "VANILLA_FAMILIES",
    "Family",
    "ModelDescription",
    "hf_name",
    "hf_tensors",
    "read_directory",
    "read_fields",
    "read_hf_fields",
    "write_fields",
]

#: Families of ordinary decoders, in the order in which `model.family: auto` tries them.
VANILLA_FAMILIES: tuple[Family, ...] = (Qwen3(), Llama(), Qwen2(), Mistral(), Dory())
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*VANILLA_FAMILIES, DMTD())}


def read_fields(fields: Mapping[str, Any]) -> ModelDescription:
    """What the fields of a `config.json` describe.

    Raises:
        ModelError: Its `model_type` is unknown, or a field is unknown, contradicts another, or asks for what is not computed.
        ConfigError: Shapes contradict each other.
    """
    model_type = str(fields.get("model_type"))
    if model_type not in FAMILIES:
        refuse([f"model_type {model_type!r}"], required="a model_type among " + ", ".join(sorted(FAMILIES)))
    reader = Fields(fields)
    reader.take("model_type")
    description = FAMILIES[model_type].read(reader)
    validate_model(description.model)
    validate_cycle(description.cycle, description.model)
    return description


def read_directory(directory: str | Path) -> ModelDescription:
    """What `directory`/config.json describes. Raises as `read_fields`, and `ModelError` if there is no such file."""
    return read_fields(read_hf_fields(directory))


def read_hf_fields(directory: str | Path) -> dict[str, Any]:
    """The fields of `directory`/config.json, unchanged. Raises `ModelError` if there is none, or it is not a JSON object."""
    refusal = Refusal(ModelError, required="a Hugging Face model directory", remedy="check the path")
    return read_object(Path(directory) / "config.json", refusal)


def write_fields(description: ModelDescription) -> dict[str, Any]:
    """The fields of a `config.json`: of `model.family` for a vanilla model, else of the DMTD family.

    Raises `ModelError` if the family cannot express a part of the decoder.
    """
    if not description.cycle.is_vanilla:
        if lacks := beyond_llama(description.model):
            raise ModelError(
                found=f"a decoder with cycles and {' and '.join(lacks)}",
                required="parts that the code of exported DMTD models computes",
                remedy="export it as an ordinary decoder (--vanilla), or train one without these parts",
            )
        return FAMILIES[DMTD.model_type].write(description)
    return vanilla_family(description).write(description)


def vanilla_family(description: ModelDescription) -> Family:
    """The family of an ordinary decoder with these parts. Raises `ModelError` if there is none, or `model.family` lacks some."""
    model = description.model
    if model.family == "auto":
        candidates: tuple[Family, ...] = VANILLA_FAMILIES
    else:
        candidates = tuple(family for family in VANILLA_FAMILIES if family.model_type == model.family)
    found = {family.model_type: _lacks(family, model) for family in candidates}
    for family in candidates:
        if not found[family.model_type]:
            return family
    lacks = [f"{name} has no {' and no '.join(parts)}" for name, parts in found.items()]
    raise ModelError(
        found=f"model.family = {model.family} for a decoder that it cannot describe"
        + (f" ({'; '.join(lacks)})" if lacks else ""),
        required=f"auto, or a family with all parts of the decoder, among {[f.model_type for f in VANILLA_FAMILIES]}",
        remedy="set model.family to auto, or change the decoder",
    )


def _lacks(family: Family, model: ModelConfig) -> list[str]:
    return family.lacks(model) if isinstance(family, Dory) else family.lacks(model) + beyond_llama(model)
