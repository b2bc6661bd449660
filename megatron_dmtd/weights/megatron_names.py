"""How the tensors of a decoder in Megatron's form and in Hugging Face's map to each other: one table, read in both directions.

Megatron's tensors are whole here (no tensor parallelism) and one per layer, under the names of its GPTModel. All names and shapes
are derived from `architecture.tensors`. Values are moved, never changed: a round trip is bitwise exact. Reads no files.

Shape legend: V vocabulary, X hidden size, G key/value heads, H query heads, D head width, R rows of whatever a matrix holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dmtd.architecture import DecoderSpec, LayerSpec, decoder_tensors, layer_tensors
from megatron_dmtd.architecture import tensors as parts
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.families.names import HEAD as HF_HEAD
from megatron_dmtd.families.names import TABLE as HF_TABLE
from megatron_dmtd.families.names import hf_name
from megatron_dmtd.models.vocab import padded_vocab_size
from megatron_dmtd.weights.specs import FLOAT_TYPES, Shape, TensorSpec, spec_of

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
INJECTION = "decoder.injection.weight"
LOGIT_SCALE = "logit_scale"
#: prefix of the tensors that every layer has in Megatron's model
LAYERS = "decoder.layers."

#: Part of a layer -> Megatron's module, where one part is one module.
_SAME = {
    parts.ATTENTION_NORM: "input_layernorm",
    parts.QUERY_NORM: "self_attention.q_layernorm",
    parts.KEY_NORM: "self_attention.k_layernorm",
    parts.OUTPUT: "self_attention.linear_proj",
    parts.MLP_NORM: "pre_mlp_layernorm",
    parts.DOWN: "mlp.linear_fc2",
    parts.ATTENTION_GATE: "self_attention.linear_gate",
}
#: Parts that are parameters themselves, not weights of a module.
_SCALES = {
    parts.QUERY_SCALE: "self_attention.query_scale",
    parts.ATTENTION_GATE_SCALE: "self_attention.gate_scale",
    parts.ATTENTION_STEP: "self_attn_bda.scale",
    parts.GATE_SCALE: "mlp.gate_scale",
    parts.UP_SCALE: "mlp.up_scale",
    parts.MLP_STEP: "mlp_bda.scale",
}
#: Modules that hold several parts.
_QKV, _GATE_AND_UP = "self_attention.linear_qkv", "mlp.linear_fc1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One of Megatron's tensors, and those of Hugging Face's that hold the same values."""

    megatron_name: str
    megatron_shapes: tuple[Shape, ...]
    """Accepted shapes; an import makes the first."""
    hf: tuple[tuple[str, Shape], ...]
    """Name and shape of each of Hugging Face's tensors."""
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    """Gives one view of Megatron's tensor for each of Hugging Face's, with that one's values in order. Both directions use it: an
    import fills the views, an export copies them out."""

    @property
    def is_of_a_layer(self) -> bool:
        """Whether it is a tensor that every layer has."""
        return self.megatron_name.startswith(LAYERS)

    def join(self, read_into: Callable[[str, torch.Tensor], None], whole: torch.Tensor) -> torch.Tensor:
        """Fill and return `whole`, of Megatron's first shape: parts by `read_into(hf name, view)`, the rest with zeros."""
        whole[sum(shape[0] for _, shape in self.hf) :].zero_()  # padding, which follows the parts
        for (name, _), view in zip(self.hf, self.parts(whole), strict=True):
            read_into(name, view)
        return whole

    def split(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face's tensors, by name. They may share memory with Megatron's."""
        for (name, shape), view in zip(self.hf, self.parts(whole), strict=True):
            yield name, view.reshape(shape)


def _vocabulary(megatron_name: str, name: str, decoder: DecoderSpec) -> Rule:
    """Zero rows fill the tensor up to the padded vocabulary; an export cuts them off."""
    shape = decoder_tensors(decoder)[name].shape
    return Rule(
        megatron_name=megatron_name,
        megatron_shapes=((padded_vocab_size(decoder.vocab_size), *shape[1:]), shape),
        hf=((hf_name(name, decoder), shape),),
        parts=lambda whole_RX: (whole_RX[: decoder.vocab_size],),
    )


def _one(megatron_name: str, name: str, shape: Shape) -> Rule:
    return Rule(megatron_name=megatron_name, megatron_shapes=(shape,), hf=((name, shape),), parts=lambda whole: (whole,))


def _joined(megatron_name: str, hf: list[tuple[str, Shape]], split: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> Rule:
    rows = sum(shape[0] for _, shape in hf)
    return Rule(megatron_name=megatron_name, megatron_shapes=((rows, *hf[0][1][1:]),), hf=tuple(hf), parts=split)


def _split_qkv(layer: LayerSpec) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """Megatron keeps each group's query heads, key head and value head together, so that a slice of rows is a slice of groups."""
    groups, head_dim = layer.attention.num_key_value_heads, layer.attention.head_dim
    per_group = layer.attention.num_attention_heads // groups

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        return whole.view(groups, per_group + 2, head_dim, *whole.shape[1:]).split([per_group, 1, 1], dim=1)

    return split


def _layer_rules(decoder: DecoderSpec, index: int) -> Iterable[Rule]:
    layer = decoder.layers[index]
    shapes = {name: tensor.shape for name, tensor in layer_tensors(layer, decoder.hidden_size).items()}
    prefix = f"{LAYERS}{index}."

    def hf(part: str, kind: str) -> tuple[str, Shape]:
        return hf_name(parts.layer_name(index, f"{part}.{kind}"), decoder), shapes[f"{part}.{kind}"]

    for name in shapes:
        part, kind = name.rsplit(".", 1)
        if part == parts.QUERY:
            qkv = [hf(each, kind) for each in (parts.QUERY, parts.KEY, parts.VALUE)]
            yield _joined(f"{prefix}{_QKV}.{kind}", qkv, _split_qkv(layer))
        elif part == parts.GATE:
            halves = [hf(each, kind) for each in (parts.GATE, parts.UP)]
            yield _joined(f"{prefix}{_GATE_AND_UP}.{kind}", halves, lambda whole: whole.chunk(2))
        elif part in _SCALES:
            yield _one(prefix + _SCALES[part], *hf(part, kind))
        elif part in _SAME:
            yield _one(f"{prefix}{_SAME[part]}.{kind}", *hf(part, kind))
        else:
            assert part in (parts.KEY, parts.VALUE, parts.UP), f"no name of Megatron's for {part}"


def rules(decoder: DecoderSpec) -> tuple[Rule, ...]:
    """The table: every tensor of `decoder`, once."""
    shapes = decoder_tensors(decoder)
    table = [_vocabulary(EMBEDDING, f"{parts.EMBEDDING}.weight", decoder)]
    for index in range(decoder.num_layers):
        table += _layer_rules(decoder, index)
    for megatron_name, part in ((INJECTION, parts.INJECTION), (FINAL_NORM, parts.FINAL_NORM)):
        if (name := f"{part}.weight") in shapes:
            table.append(_one(megatron_name, hf_name(name, decoder), shapes[name].shape))
    for megatron_name, part in ((HEAD, parts.HEAD), (LOGIT_SCALE, parts.LOGIT_SCALE)):
        if (name := f"{part}.weight") in shapes:
            table.append(_vocabulary(megatron_name, name, decoder))
    return tuple(table)


def _faults(expected: Mapping[str, tuple[Shape, ...]], found: Mapping[str, TensorSpec], *, any_type: bool = False) -> list[str]:
    faults = [f"missing: {name} {list(shapes[0])}" for name, shapes in expected.items() if name not in found]
    for name, spec in found.items():
        if name not in expected:
            faults.append(f"unknown: {name} {list(spec.shape)}")
            continue
        if spec.shape not in expected[name]:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected[name]))
            faults.append(f"wrong shape: {name} is {list(spec.shape)}, not {wanted}")
        if not any_type and spec.dtype not in FLOAT_TYPES:
            faults.append(f"wrong type: {name} is {spec.dtype}")
    return faults


def _mixed_types(table: Sequence[Rule], found: Mapping[str, TensorSpec]) -> list[str]:
    """Parts of one of Megatron's tensors that differ in type: joining them would change values."""
    faults = []
    for rule in table:
        types = {str(found[name].dtype) for name, _ in rule.hf if name in found}
        if len(types) > 1:
            faults.append(f"wrong type: {', '.join(name for name, _ in rule.hf)} mix {' and '.join(sorted(types))}")
    return faults


def _refuse(faults: list[str]) -> None:
    if faults:
        raise ConversionError(
            found=f"{len(faults)} fault(s):\n  " + "\n  ".join(faults),
            required="each tensor of the model once, in its shape, as float32, bfloat16 or float16",
            remedy="compare the configuration with the weights; nothing was converted",
        )


def check_megatron(decoder: DecoderSpec, found: Mapping[str, TensorSpec]) -> None:
    """Accept exactly Megatron's tensors of `decoder`, or raise one `ConversionError` that lists every fault."""
    _refuse(_faults({rule.megatron_name: rule.megatron_shapes for rule in rules(decoder)}, found))


def check_hf(decoder: DecoderSpec, found: Mapping[str, TensorSpec], *, any_type: bool = False) -> None:
    """Accept exactly Hugging Face's tensors of `decoder`, or raise one `ConversionError` that lists every fault.

    A tied model may carry the head too; `check_tied_head` compares the numbers. `any_type`: for whoever converts every tensor to
    a type of their own, and so need not find one type in all parts of a tensor of Megatron's.
    """
    table = rules(decoder)
    # Some writers store the tied head a second time; it is compared with the embedding table instead of mapped.
    kept = {name: spec for name, spec in found.items() if not (decoder.tie_word_embeddings and name == HF_HEAD)}
    expected = {name: (shape,) for rule in table for name, shape in rule.hf}
    _refuse(_faults(expected, kept, any_type=any_type) + ([] if any_type else _mixed_types(table, kept)))


def check_tied_head(decoder: DecoderSpec, names: Iterable[str], are_equal: Callable[[str, str], bool]) -> None:
    """Raise `ConversionError` if a tied model carries a head that is not its embedding table."""
    if decoder.tie_word_embeddings and HF_HEAD in names and not are_equal(HF_HEAD, HF_TABLE):
        _refuse([f"{HF_HEAD} differs from {HF_TABLE}, though the configuration ties them"])


def hf_specs(
    decoder: DecoderSpec, megatron: Mapping[str, TensorSpec], *, dtype: torch.dtype | None = None
) -> dict[str, TensorSpec]:
    """What an export of Megatron's tensors holds, in the order in which it is written; `dtype` None keeps the types."""
    return {
        name: TensorSpec(shape, dtype or megatron[rule.megatron_name].dtype) for rule in rules(decoder) for name, shape in rule.hf
    }


def megatron_specs(decoder: DecoderSpec, hf: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What an import of Hugging Face's tensors holds."""
    return {rule.megatron_name: TensorSpec(rule.megatron_shapes[0], hf[rule.hf[0][0]].dtype) for rule in rules(decoder)}


def to_hf(decoder: DecoderSpec, megatron: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's tensors under Hugging Face's names. They may share memory.

    Raises one `ConversionError` for all missing, unknown, misshaped and wrongly typed tensors.
    """
    check_megatron(decoder, {name: spec_of(tensor) for name, tensor in megatron.items()})
    return {name: part for rule in rules(decoder) for name, part in rule.split(megatron[rule.megatron_name])}


def from_hf(decoder: DecoderSpec, hf: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors as Megatron's, vocabulary padded.

    Raises one `ConversionError` for all missing, unknown, misshaped and wrongly typed tensors, or if a tied head differs.
    """
    check_hf(decoder, {name: spec_of(tensor) for name, tensor in hf.items()})
    check_tied_head(decoder, hf, lambda first, second: torch.equal(hf[first], hf[second]))

    def read_into(name: str, view: torch.Tensor) -> None:
        view.copy_(hf[name].reshape(view.shape))

    def joined(rule: Rule) -> torch.Tensor:
        return rule.join(read_into, torch.empty(rule.megatron_shapes[0], dtype=hf[rule.hf[0][0]].dtype))

    return {rule.megatron_name: joined(rule) for rule in rules(decoder)}
