"""The tensors of a decoder, under neutral names from which all other names are derived.

`families` maps them to Hugging Face's names, `weights` to Megatron's, and the engine to its fused matrices: three readers of one
list. Matrices are `[out, in]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dmtd.architecture.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec

EMBEDDING, HEAD, FINAL_NORM, LOGIT_SCALE, INJECTION = "embedding", "head", "final_norm", "logit_scale", "injection"

#: Parts of a layer's names, in the order in which a layer uses them.
ATTENTION_NORM, MLP_NORM = "attention_norm", "mlp_norm"
QUERY, KEY, VALUE, OUTPUT = "attention.q", "attention.k", "attention.v", "attention.o"
QUERY_NORM, KEY_NORM = "attention.q_norm", "attention.k_norm"
QUERY_SCALE, ATTENTION_GATE, ATTENTION_GATE_SCALE = "attention.q_scale", "attention.g", "attention.g_scale"
GATE, UP, DOWN = "mlp.gate", "mlp.up", "mlp.down"
GATE_SCALE, UP_SCALE = "mlp.gate_scale", "mlp.up_scale"
ATTENTION_STEP, MLP_STEP = "attention_step", "mlp_step"


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
    found = _norm(ATTENTION_NORM, layer.norm, hidden_size) | _attention_tensors(layer.attention, hidden_size)
    if layer.attention_step is not None:
        found |= _vector(ATTENTION_STEP, hidden_size)
    found |= _norm(MLP_NORM, layer.norm, hidden_size) | _mlp_tensors(layer.mlp, hidden_size)
    if layer.mlp_step is not None:
        found |= _vector(MLP_STEP, hidden_size)
    return found


def _attention_tensors(attention: AttentionSpec, hidden_size: int) -> dict[str, TensorShape]:
    query, key = attention.query_size, attention.key_size
    found = {}
    for name, rows in ((QUERY, query), (KEY, key), (VALUE, key)):
        found[f"{name}.weight"] = TensorShape((rows, hidden_size), 0)
        if attention.qkv_bias:
            found[f"{name}.bias"] = TensorShape((rows,), 0)
    for name in (QUERY_NORM, KEY_NORM):
        found |= _norm(name, attention.qk_norm, attention.head_dim)
    if attention.query_scale is not None:
        found |= _vector(QUERY_SCALE, query, split_dim=0)
    if attention.gate is not None:
        found[f"{ATTENTION_GATE}.weight"] = TensorShape((query, hidden_size), 0)
        found |= _vector(ATTENTION_GATE_SCALE, query, split_dim=0)
    found |= _norm(f"{OUTPUT}_norm", attention.output_norm, query)
    found[f"{OUTPUT}.weight"] = TensorShape((hidden_size, query), 1)
    if attention.output_bias:
        found[f"{OUTPUT}.bias"] = TensorShape((hidden_size,))
    return found


def _mlp_tensors(mlp: MLPSpec, hidden_size: int) -> dict[str, TensorShape]:
    inner = mlp.intermediate_size
    found = {f"{name}.weight": TensorShape((inner, hidden_size), 0) for name in (GATE, UP)}
    for name, scale in ((GATE_SCALE, mlp.gate_scale), (UP_SCALE, mlp.up_scale)):
        if scale is not None:
            found |= _vector(name, inner, split_dim=0)
    found |= _norm(f"{DOWN}_norm", mlp.inner_norm, inner)
    found[f"{DOWN}.weight"] = TensorShape((hidden_size, inner), 1)
    return found


def _norm(name: str, norm: NormSpec | None, width: int) -> dict[str, TensorShape]:
    return _vector(name, width) if norm is not None and norm.has_weight else {}


def _vector(name: str, width: int, split_dim: int | None = None) -> dict[str, TensorShape]:
    return {f"{name}.weight": TensorShape((width,), split_dim)}


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
    if decoder.loop is not None and decoder.loop.injection == "concat_linear":
        found[f"{INJECTION}.weight"] = TensorShape((decoder.hidden_size, 2 * decoder.hidden_size))
    found |= _norm(FINAL_NORM, decoder.final_norm, decoder.hidden_size)
    if not decoder.tie_word_embeddings:
        found[f"{HEAD}.weight"] = table
    if decoder.logit_scale is not None:
        found |= _vector(LOGIT_SCALE, decoder.vocab_size, split_dim=0)
    return found


def num_parameters(decoder: DecoderSpec) -> int:
    """Parameters of the decoder, each counted once; the method adds none."""
    return sum(shape.num_elements for shape in decoder_tensors(decoder).values())


def num_layer_parameters(layer: LayerSpec, hidden_size: int, *, tensor_parallel: int = 1) -> int:
    """Parameters of one layer on one tensor-parallel rank."""
    shapes = layer_tensors(layer, hidden_size).values()
    return sum(shape.num_elements // (1 if shape.split_dim is None else tensor_parallel) for shape in shapes)
