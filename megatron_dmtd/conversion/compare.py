"""Two models on disk, whatever their formats, tensor by tensor under Hugging Face's names.

Equality is of bits: -0.0 is not 0.0, and a NaN equals itself. Only one tensor of each model is in memory at a time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.progress import tensor_bar
from megatron_dmtd.conversion.sources import Source
from megatron_dmtd.weights.megatron_names import Rule, rules
from megatron_dmtd.weights.specs import TensorSpec

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: fields of the model that describe how weights were made or used, not what they are
_NOT_NUMBERS = ("family", "init_std", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDifference:
    """How much the values of one tensor differ."""

    name: str
    num_elements: int
    num_different: int
    """Elements whose bits differ."""
    largest: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference over the norm of the first tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything in which two models differ. Empty lists: they are the same model, bit for bit."""

    settings: list[str]
    """Fields of the configurations, in words."""
    structure: list[str]
    """Tensors of one side only, or of two shapes or types, in words."""
    values: list[ValueDifference]
    num_equal: int
    """Tensors that are the same on both sides, type included."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.settings or self.structure or self.values)

    @property
    def differs_in_method_only(self) -> bool:
        """Whether the method differs and nothing else."""
        only_cycles = all(line.startswith("cycle.") for line in self.settings)
        return bool(self.settings) and only_cycles and not (self.structure or self.values)


def compare(first: Source, second: Source, *, dtype: torch.dtype | None = None, ignore_cycles: bool = False) -> Comparison:
    """Compare all settings that change what a model computes, and all tensors.

    `dtype`: cast the first model's tensors before comparing, as an export with this type does. `ignore_cycles`: the method may
    differ, as in a vanilla export.
    """
    settings = _differing_fields("model", first.model, second.model, skip=_NOT_NUMBERS)
    if not ignore_cycles:
        settings += _differing_cycles(first.cycle, second.cycle)
    ours, theirs = first.hf_specs(), second.hf_specs()
    if dtype is not None:
        ours = {name: TensorSpec(spec.shape, dtype) for name, spec in ours.items()}
    structure = [f"{name} is in {first.directory} only" for name in ours if name not in theirs]
    structure += [f"{name} is in {second.directory} only" for name in theirs if name not in ours]
    for name in ours.keys() & theirs.keys():
        if ours[name] != theirs[name]:
            structure.append(f"{name} is {_words(ours[name])} and {_words(theirs[name])}")
    comparable = {name for name in ours if name in theirs and ours[name].shape == theirs[name].shape}
    values = _value_differences(first, second, comparable, dtype)
    unequal = {difference.name for difference in values}
    same = [name for name in comparable if ours[name] == theirs[name] and name not in unequal]
    return Comparison(settings=settings, structure=sorted(structure), values=values, num_equal=len(same))


def _words(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def _differing_fields(section: str, first: object, second: object, *, skip: tuple[str, ...] = ()) -> list[str]:
    names = [field.name for field in dataclasses.fields(first) if field.name not in skip]  # type: ignore[arg-type]
    pairs = [(name, getattr(first, name), getattr(second, name)) for name in names]
    return [f"{section}.{name} is {one} and {other}" for name, one, other in pairs if one != other]


def _differing_cycles(first: CycleConfig, second: CycleConfig) -> list[str]:
    if first.is_vanilla or second.is_vanilla:
        # The other fields have no meaning in a vanilla model: it has no MASK that could be another.
        return _differing_fields("cycle", _variant_only(first), _variant_only(second))
    return _differing_fields("cycle", first, second)


def _variant_only(cycle: CycleConfig) -> CycleConfig:
    return CycleConfig(variant=cycle.variant)


def _value_differences(first: Source, second: Source, names: set[str], dtype: torch.dtype | None) -> list[ValueDifference]:
    """In the order of the first model. Rules with the same Megatron name give the same Hugging Face names in both."""
    theirs = {rule.megatron_name: rule for rule in rules(second.description.decoder)}
    found = []
    specs = first.hf_specs()
    with tensor_bar("comparing", (specs[name] for name in names)) as bar:
        for rule in rules(first.description.decoder):
            compared = [name for name, _ in rule.hf if name in names]
            if compared:
                found += _rule_differences(first, second, rule, theirs[rule.megatron_name], names, dtype)
                bar.update(sum(specs[name].num_bytes for name in compared))
    return found


def _rule_differences(
    first: Source, second: Source, rule: Rule, their_rule: Rule, names: set[str], dtype: torch.dtype | None
) -> list[ValueDifference]:
    found = []
    for (name, one), (other_name, other) in zip(first.hf(rule), second.hf(their_rule), strict=True):
        assert name == other_name, (name, other_name)
        if name in names:
            difference = _difference(name, one.to(dtype or one.dtype), other)
            if difference is not None:
                found.append(difference)
    return found


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> ValueDifference | None:
    if one.dtype == other.dtype:
        bits = _INTEGERS[one.dtype.itemsize]
        one_bits, other_bits = one.contiguous().view(bits), other.contiguous().view(bits)
        if torch.equal(one_bits, other_bits):
            return None
        num_different = int((one_bits != other_bits).sum())
    else:
        num_different = int((one.double() != other.double()).sum())
    if not num_different:
        return None
    difference = one.float() - other.float()
    norm = one.float().norm().item()
    relative = difference.norm().item() / norm if norm else float("inf")
    return ValueDifference(
        name=name,
        num_elements=one.numel(),
        num_different=num_different,
        largest=difference.abs().max().item(),
        relative=relative,
    )
