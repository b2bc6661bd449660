"""Floating-point operations of a schedule, visit by visit.

A multiplication and an addition count as two operations, a training step as three forward passes. Only matrix products count:
projections, the output head and attention over the keys that a query really sees (docs/method.md, sections 2 to 5), not the
rectangle that a kernel may compute. Repeated work (recompute) and useless work (everything but K and V of a stream that ends at a
visit) do not count. Norms, rotation and biases are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_dmtd.architecture.schedule import Schedule, Stream, Visit
from megatron_dmtd.architecture.spec import LayerSpec
from megatron_dmtd.cycle.method import Method

#: forward pass, gradient of the inputs, gradient of the weights
TRAINING_PASSES = 3
#: a multiplication and an addition
_OPERATIONS = 2
#: products of queries with keys, and of scores with values
_ATTENTION_PRODUCTS = 2


def key_value_weights(layer: LayerSpec, hidden_size: int) -> int:
    """Weights of a layer that produce a token's K and V."""
    return 2 * hidden_size * layer.attention.key_size


def matrix_weights(layer: LayerSpec, hidden_size: int) -> int:
    """Weights of a layer that multiply a token."""
    of_queries = 3 if layer.attention.gate is not None else 2  # queries, output, gate
    return (
        of_queries * hidden_size * layer.attention.query_size
        + key_value_weights(layer, hidden_size)
        + 3 * hidden_size * layer.mlp.intermediate_size
    )


def injection_weights(schedule: Schedule, visit: Visit) -> int:
    """Weights that multiply each token where a loop takes in what reached its first layer."""
    loop = schedule.decoder.loop
    if loop is None or loop.injection != "concat_linear" or not visit.enters_loop:
        return 0
    return 2 * schedule.decoder.hidden_size**2


def visit_weights(schedule: Schedule, visit: Visit) -> int:
    """Weights that multiply each token in a visit, once per stream that leaves; streams that end give K and V only."""
    layer, hidden_size = schedule.layer(visit), schedule.decoder.hidden_size
    ending = len(visit.streams) - len(visit.outputs)
    return (
        len(visit.streams) * injection_weights(schedule, visit)
        + len(visit.outputs) * matrix_weights(layer, hidden_size)
        + ending * key_value_weights(layer, hidden_size)
    )


def _causal_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs of one document if each query sees itself and earlier slots, at most `window` keys in all."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _block_pairs(method: Method, length: int, window: int | None) -> int:
    """The same if each query also sees all of its own cycle."""
    assert method.complete_length(length) == length, (length, method)
    cycle = method.cycle_length
    ahead = length * (cycle - 1) // 2  # a query at phase p sees cycle - 1 - p slots after it
    return _causal_pairs(length, window) + ahead


def visit_pairs(schedule: Schedule, visit: Visit, *, length: int) -> int:
    """(query, key) pairs that the streams leaving a visit score in one document of `length` tokens."""
    method, window = schedule.method, schedule.layer(visit).attention.window
    pairs = 0
    for stream in visit.outputs:
        is_block = stream is Stream.SHADOW and method.is_bidirectional
        pairs += _block_pairs(method, length, window) if is_block else _causal_pairs(length, window)
    return pairs


def visit_flops(schedule: Schedule, visit: Visit, *, document_lengths: Iterable[int]) -> int:
    """FLOPs of one visit in a training step over documents of these lengths (whole cycles for bidirectional blocks)."""
    lengths = list(document_lengths)
    pairs = sum(visit_pairs(schedule, visit, length=length) for length in lengths)
    products = sum(lengths) * visit_weights(schedule, visit)
    products += _ATTENTION_PRODUCTS * schedule.layer(visit).attention.query_size * pairs
    return TRAINING_PASSES * _OPERATIONS * products


def head_flops(schedule: Schedule, *, num_tokens: int) -> int:
    """FLOPs of the output head in a training step."""
    decoder = schedule.decoder
    return TRAINING_PASSES * _OPERATIONS * num_tokens * decoder.vocab_size * decoder.hidden_size


def training_flops(schedule: Schedule, *, document_lengths: Iterable[int]) -> int:
    """FLOPs of one forward and backward pass over documents of these lengths (tokens)."""
    lengths = list(document_lengths)
    visits = sum(visit_flops(schedule, visit, document_lengths=lengths) for visit in schedule.visits)
    return visits + head_flops(schedule, num_tokens=sum(lengths))


def training_flops_per_token(schedule: Schedule, *, document_length: int) -> float:
    """FLOPs per token of a training step whose documents are all `document_length` tokens long."""
    return training_flops(schedule, document_lengths=[document_length]) / document_length


def decoding_weights(schedule: Schedule) -> float:
    """Weights read per token in decoding at batch 1: the parallel pass once per cycle, the sequential one and the head per token.

    Norms and biases are left out. Vanilla's figure over a variant's is the largest speed-up that weight traffic allows.
    """
    decoder, method = schedule.decoder, schedule.method
    reads = dict.fromkeys(("parallel", "sequential"), 0)
    for visit in schedule.visits:
        reads[visit.pass_name] += matrix_weights(schedule.layer(visit), decoder.hidden_size) + injection_weights(schedule, visit)
    return reads["parallel"] / method.cycle_length + reads["sequential"] + decoder.vocab_size * decoder.hidden_size
