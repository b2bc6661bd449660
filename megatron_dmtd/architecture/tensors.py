"""The tensors of a decoder, under neutral names from which all other names are derived.

`families` maps them to Hugging Face's names, `weights` to Megatron's, and the engine to its fused matrices: three readers of one
list. Matrices are `[out, in]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dmtd.architecture.spec import DecoderSpec, LayerSpec

EMBEDDING, HEAD, FINAL_NORM = "embedding", "head", "final_norm"

#: Parts of a layer's names, in the order in which a layer uses them.
ATTENTION_NORM, MLP_NORM = "attention_norm", "mlp_norm"
QUERY, KEY, VALUE, OUTPUT = "attention.q", "attention.k", "attention.v", "attention.o"
QUERY_NORM, KEY_NORM = "attention.q_norm", "attention.k_norm"
GATE, UP, DOWN = "mlp.gate", "mlp.up", "mlp.down"


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape of one tensor, and the dimension along which tensor-parallel ranks split it."""

    shape: tuple[int, ...]
    split_dim: int | None = None
    """0: rows (a column-parallel layer). 1: columns (a row-parallel layer). None: every rank holds all of it."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def layer_tensors(layer: LayerSpec, hidden_size: int) -> dict[str, TensorShape]:
    """Part name -> shape of each tensor of one layer, such as `attention.q.weight`."""
    attention, inner = layer.attention, layer.mlp.intermediate_size
    query, key = attention.query_size, attention.key_size
    found = {f"{ATTENTION_NORM}.weight": TensorShape((hidden_size,))}
    for name, rows in ((QUERY, query), (KEY, key), (VALUE, key)):
        found[f"{name}.weight"] = TensorShape((rows, hidden_size), 0)
        if attention.qkv_bias:
            found[f"{name}.bias"] = TensorShape((rows,), 0)
    if attention.qk_norm is not None:
        found |= {f"{name}.weight": TensorShape((attention.head_dim,)) for name in (QUERY_NORM, KEY_NORM)}
    found[f"{OUTPUT}.weight"] = TensorShape((hidden_size, query), 1)
    if attention.output_bias:
        found[f"{OUTPUT}.bias"] = TensorShape((hidden_size,))
    found[f"{MLP_NORM}.weight"] = TensorShape((hidden_size,))
    found |= {f"{name}.weight": TensorShape((inner, hidden_size), 0) for name in (GATE, UP)}
    found[f"{DOWN}.weight"] = TensorShape((hidden_size, inner), 1)
    return found


def layer_name(index: int, part: str) -> str:
    """The name of a layer's tensor in the whole decoder."""
    return f"layers.{index}.{part}"


def decoder_tensors(decoder: DecoderSpec) -> dict[str, TensorShape]:
    """Name -> shape of every tensor of the decoder, each once: a tied head is the embedding table."""
    table = TensorShape((decoder.vocab_size, decoder.hidden_size), 0)
    found = {f"{EMBEDDING}.weight": table}
    for index, layer in enumerate(decoder.layers):
        parts = layer_tensors(layer, decoder.hidden_size)
        found |= {layer_name(index, part): shape for part, shape in parts.items()}
    found[f"{FINAL_NORM}.weight"] = TensorShape((decoder.hidden_size,))
    if not decoder.tie_word_embeddings:
        found[f"{HEAD}.weight"] = table
    return found


def num_parameters(decoder: DecoderSpec) -> int:
    """Parameters of the decoder, each counted once; the method adds none."""
    return sum(shape.num_elements for shape in decoder_tensors(decoder).values())


def num_layer_parameters(layer: LayerSpec, hidden_size: int, *, tensor_parallel: int = 1) -> int:
    """Parameters of one layer on one tensor-parallel rank."""
    shapes = layer_tensors(layer, hidden_size).values()
    return sum(shape.num_elements // (1 if shape.split_dim is None else tensor_parallel) for shape in shapes)
