"""How the tensors of a Hugging Face decoder and of our Megatron model map to each other: one table, read in both directions.

"Own" tensors are whole (no tensor parallelism) and one per layer, under the names of Megatron's GPTModel; "foreign" ones are
those of Hugging Face's Qwen3 and Llama. Values are never changed, only placed: there and back is bitwise. Reads no files.

Shape legend: V vocabulary, H hidden size, F intermediate size, G key-value heads (groups), Q query heads per group, D head width,
R rows of whatever a matrix holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.models.vocab import padded_vocab_size

#: types of weights; anything else (quantised, integer) has no counterpart on the other side
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_FOREIGN_EMBEDDING = "model.embed_tokens.weight"
_FOREIGN_HEAD = "lm_head.weight"

#: own names of what every layer has begin so
LAYERS = "decoder.layers."

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file's header tells of a tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One own tensor and the foreign tensors that hold the same numbers."""

    own_name: str
    own_shapes: tuple[Shape, ...]
    """Accepted shapes; an import makes the first."""
    foreign: tuple[tuple[str, Shape], ...]
    """Name and shape of each foreign tensor."""
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    """The own tensor to one view of it for each foreign tensor, which holds that one's numbers in order. Read in both
    directions: an import fills the views, an export copies them out."""

    @property
    def is_of_a_layer(self) -> bool:
        """Whether it is a tensor that every layer has."""
        return self.own_name.startswith(LAYERS)

    def join(self, read_into: Callable[[str, torch.Tensor], None], whole: torch.Tensor) -> torch.Tensor:
        """Fill and return `whole`, of the first own shape: parts by `read_into(foreign name, view)`, the rest with zeros."""
        whole[sum(shape[0] for _, shape in self.foreign) :].zero_()  # padding, which follows the parts
        for (name, _), view in zip(self.foreign, self.parts(whole), strict=True):
            read_into(name, view)
        return whole

    def split(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The foreign tensors, by name. They may share memory with the own one."""
        for (name, shape), view in zip(self.foreign, self.parts(whole), strict=True):
            yield name, view.reshape(shape)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor in memory."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _same(own_name: str, foreign_name: str, shape: Shape) -> Rule:
    return Rule(
        own_name=own_name,
        own_shapes=(shape,),
        foreign=((foreign_name, shape),),
        parts=lambda whole: (whole,),
    )


def _vocabulary(own_name: str, foreign_name: str, model: ModelConfig) -> Rule:
    """Zero rows fill the table up to its padded size; they are cut off again."""
    padded = padded_vocab_size(model.vocab_size)
    return Rule(
        own_name=own_name,
        own_shapes=((padded, model.hidden_size), (model.vocab_size, model.hidden_size)),
        foreign=((foreign_name, (model.vocab_size, model.hidden_size)),),
        parts=lambda whole_RH: (whole_RH[: model.vocab_size],),
    )


def _query_key_value(own_name: str, foreign_prefix: str, model: ModelConfig) -> Rule:
    """Megatron keeps each group's query heads, key head and value head together, so that a slice of rows is a slice of groups."""
    groups, head_dim, hidden = model.num_key_value_heads, model.head_dim, model.hidden_size
    per_group = model.num_attention_heads // groups
    query_shape = (model.num_attention_heads * head_dim, hidden)
    key_shape = (groups * head_dim, hidden)

    def parts(whole_RH: torch.Tensor) -> Sequence[torch.Tensor]:
        return whole_RH.view(groups, per_group + 2, head_dim, hidden).split([per_group, 1, 1], dim=1)

    return Rule(
        own_name=own_name,
        own_shapes=((query_shape[0] + 2 * key_shape[0], hidden),),
        foreign=(
            (f"{foreign_prefix}.q_proj.weight", query_shape),
            (f"{foreign_prefix}.k_proj.weight", key_shape),
            (f"{foreign_prefix}.v_proj.weight", key_shape),
        ),
        parts=parts,
    )


def _gate_and_up(own_name: str, foreign_prefix: str, model: ModelConfig) -> Rule:
    shape = (model.intermediate_size, model.hidden_size)
    return Rule(
        own_name=own_name,
        own_shapes=((2 * model.intermediate_size, model.hidden_size),),
        foreign=((f"{foreign_prefix}.gate_proj.weight", shape), (f"{foreign_prefix}.up_proj.weight", shape)),
        parts=lambda whole: whole.chunk(2),
    )


def _layer_rules(model: ModelConfig, layer: int) -> Iterable[Rule]:
    own, foreign = f"{LAYERS}{layer}", f"model.layers.{layer}"
    hidden, heads_width = model.hidden_size, model.num_attention_heads * model.head_dim
    yield _same(f"{own}.input_layernorm.weight", f"{foreign}.input_layernorm.weight", (hidden,))
    yield _query_key_value(f"{own}.self_attention.linear_qkv.weight", f"{foreign}.self_attn", model)
    if model.qk_norm:
        for name in ("q", "k"):
            own_name = f"{own}.self_attention.{name}_layernorm.weight"
            yield _same(own_name, f"{foreign}.self_attn.{name}_norm.weight", (model.head_dim,))
    yield _same(f"{own}.self_attention.linear_proj.weight", f"{foreign}.self_attn.o_proj.weight", (hidden, heads_width))
    yield _same(f"{own}.pre_mlp_layernorm.weight", f"{foreign}.post_attention_layernorm.weight", (hidden,))
    yield _gate_and_up(f"{own}.mlp.linear_fc1.weight", f"{foreign}.mlp", model)
    yield _same(f"{own}.mlp.linear_fc2.weight", f"{foreign}.mlp.down_proj.weight", (hidden, model.intermediate_size))


def rules(model: ModelConfig) -> tuple[Rule, ...]:
    """The table: every tensor of `model`, once."""
    table = [_vocabulary(EMBEDDING, _FOREIGN_EMBEDDING, model)]
    for layer in range(model.num_layers):
        table += _layer_rules(model, layer)
    table.append(_same("decoder.final_layernorm.weight", "model.norm.weight", (model.hidden_size,)))
    if not model.tie_word_embeddings:
        table.append(_vocabulary(HEAD, _FOREIGN_HEAD, model))
    return tuple(table)


def _faults(expected: Mapping[str, tuple[Shape, ...]], found: Mapping[str, TensorSpec]) -> list[str]:
    faults = [f"missing: {name} {list(shapes[0])}" for name, shapes in expected.items() if name not in found]
    for name, spec in found.items():
        if name not in expected:
            faults.append(f"unknown: {name} {list(spec.shape)}")
            continue
        if spec.shape not in expected[name]:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected[name]))
            faults.append(f"wrong shape: {name} is {list(spec.shape)}, not {wanted}")
        if spec.dtype not in FLOAT_TYPES:
            faults.append(f"wrong type: {name} is {spec.dtype}")
    return faults


def _mixed_types(table: Sequence[Rule], found: Mapping[str, TensorSpec]) -> list[str]:
    """Parts of one own tensor that differ in type: joining them would change values."""
    faults = []
    for rule in table:
        types = {str(found[name].dtype) for name, _ in rule.foreign if name in found}
        if len(types) > 1:
            faults.append(f"wrong type: {', '.join(name for name, _ in rule.foreign)} mix {' and '.join(sorted(types))}")
    return faults


def _refuse(faults: list[str]) -> None:
    if faults:
        raise ConversionError(
            found=f"{len(faults)} fault(s):\n  " + "\n  ".join(faults),
            required="each tensor of the model once, in its shape, as float32, bfloat16 or float16",
            remedy="compare the configuration with the weights; nothing was converted",
        )


def check_own(model: ModelConfig, found: Mapping[str, TensorSpec]) -> None:
    """Accept exactly the own tensors of `model`, or raise one `ConversionError` that lists every fault."""
    _refuse(_faults({rule.own_name: rule.own_shapes for rule in rules(model)}, found))


def _without_tied_head(model: ModelConfig, names: Iterable[str]) -> list[str]:
    """Some writers store the tied head a second time; it is compared with the embedding table instead of mapped."""
    return [name for name in names if not (model.tie_word_embeddings and name == _FOREIGN_HEAD)]


def check_foreign(model: ModelConfig, found: Mapping[str, TensorSpec]) -> None:
    """Accept exactly the foreign tensors of `model`, or raise one `ConversionError` that lists every fault.

    A tied model may carry the head too; `check_tied_head` compares the numbers.
    """
    table = rules(model)
    kept = {name: found[name] for name in _without_tied_head(model, found)}
    expected = {name: (shape,) for rule in table for name, shape in rule.foreign}
    _refuse(_faults(expected, kept) + _mixed_types(table, kept))


def check_tied_head(model: ModelConfig, names: Iterable[str], are_equal: Callable[[str, str], bool]) -> None:
    """Raise `ConversionError` if a tied model carries a head that is not its embedding table."""
    if model.tie_word_embeddings and _FOREIGN_HEAD in names and not are_equal(_FOREIGN_HEAD, _FOREIGN_EMBEDDING):
        _refuse([f"{_FOREIGN_HEAD} differs from {_FOREIGN_EMBEDDING}, though the configuration ties them"])


def foreign_specs(
    model: ModelConfig, own: Mapping[str, TensorSpec], *, dtype: torch.dtype | None = None
) -> dict[str, TensorSpec]:
    """What an export of own tensors holds, in the order in which it is written; `dtype` None keeps the types."""
    return {name: TensorSpec(shape, dtype or own[rule.own_name].dtype) for rule in rules(model) for name, shape in rule.foreign}


def own_specs(model: ModelConfig, foreign: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What an import of foreign tensors holds."""
    return {rule.own_name: TensorSpec(rule.own_shapes[0], foreign[rule.foreign[0][0]].dtype) for rule in rules(model)}


def to_hf(model: ModelConfig, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Own tensors of `model` under Hugging Face's names. Tensors may share memory with the own ones.

    Raises one `ConversionError` for all missing, unknown, misshaped and wrongly typed tensors.
    """
    check_own(model, {name: spec_of(tensor) for name, tensor in own.items()})
    return {name: part for rule in rules(model) for name, part in rule.split(own[rule.own_name])}


def from_hf(model: ModelConfig, foreign: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors of `model` as own ones, vocabulary padded.

    Raises one `ConversionError` for all missing, unknown, misshaped and wrongly typed tensors, or if a tied head differs.
    """
    check_foreign(model, {name: spec_of(tensor) for name, tensor in foreign.items()})
    check_tied_head(model, foreign, lambda first, second: torch.equal(foreign[first], foreign[second]))

    def read_into(name: str, view: torch.Tensor) -> None:
        view.copy_(foreign[name].reshape(view.shape))

    def joined(rule: Rule) -> torch.Tensor:
        return rule.join(read_into, torch.empty(rule.own_shapes[0], dtype=foreign[rule.foreign[0][0]].dtype))

    return {rule.own_name: joined(rule) for rule in rules(model)}
