"""Floating-point operations of a training step, and the share of the machine's peak that they reach (MFU).

A multiplication and an addition count as two operations, a training step as three forward passes. Only matrix products count:
projections, the output head and attention over the keys that a query may really see (docs/method.md, sections 2 to 5), not the
rectangle that a kernel may compute. Work that is done again (recompute) or for nothing (the real branch of the last
parallel layer beyond its keys and values) does not count. Reads no tensors and no clocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.cycle import complete_length
from megatron_dmtd.errors import ConfigError

#: forward pass, gradient of the inputs, gradient of the weights
_PASSES = 3


def _key_value_weights(model: ModelConfig) -> int:
    return 2 * model.hidden_size * model.num_key_value_heads * model.head_dim


def _layer_weights(model: ModelConfig) -> int:
    """Weights of one layer that multiply a token; norms are left out."""
    query_and_output = 2 * model.hidden_size * model.num_attention_heads * model.head_dim
    return query_and_output + _key_value_weights(model) + 3 * model.hidden_size * model.intermediate_size


def _causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def _block_pairs(length: int, cycle_length: int) -> int:
    """(query, key) pairs of one document if each query sees its whole cycle and all before it."""
    assert complete_length(length, cycle_length) == length, (length, cycle_length)
    return length * (length + cycle_length) // 2


def attention_pairs(model: ModelConfig, cycle: CycleConfig, *, length: int) -> int:
    """(query, key) pairs that all layers together score for one document of `length` tokens, dead work left out."""
    causal = _causal_pairs(length)
    if cycle.is_vanilla:
        return model.num_layers * causal
    shadow = causal if cycle.block_attention == "causal" else _block_pairs(length, cycle.cycle_length)
    pairs = cycle.num_parallel_layers * shadow + (model.num_layers - cycle.num_parallel_layers) * causal
    if cycle.history == "real":
        pairs += (cycle.num_parallel_layers - 1) * causal  # nobody reads what the last real layer attends to
    return pairs


def weights_per_token(model: ModelConfig, cycle: CycleConfig) -> int:
    """Weights that multiply each token of a training step, counted once per stream, dead work left out."""
    weights = model.num_layers * _layer_weights(model) + model.vocab_size * model.hidden_size
    if not cycle.is_vanilla and cycle.history == "real":
        weights += (cycle.num_parallel_layers - 1) * _layer_weights(model) + _key_value_weights(model)
    return weights


def training_flops(model: ModelConfig, cycle: CycleConfig, *, document_lengths: Iterable[int]) -> int:
    """FLOPs of one forward and backward pass over documents of these lengths (tokens; whole cycles for bidirectional blocks)."""
    lengths = list(document_lengths)
    head_width = model.num_attention_heads * model.head_dim
    pairs = sum(attention_pairs(model, cycle, length=length) for length in lengths)
    scores_and_values = 2
    multiplications = sum(lengths) * weights_per_token(model, cycle) + scores_and_values * head_width * pairs
    return _PASSES * 2 * multiplications


def training_flops_per_token(model: ModelConfig, cycle: CycleConfig, *, document_length: int) -> float:
    """FLOPs per token of a training step whose documents are all `document_length` tokens long."""
    return training_flops(model, cycle, document_lengths=[document_length]) / document_length


def mfu(*, flops: float, seconds: float, num_devices: int, peak_tflops: float) -> float:
    """Share, 0 to 1, of the peak of `num_devices` devices that `flops` in `seconds` reach.

    `flops` is the work of all devices together; `peak_tflops` is the peak of one, in 1e12 operations a second, of the type that
    the matrix products run in and without sparsity. Raises `ConfigError` if there is no peak to compare with.
    """
    if peak_tflops <= 0:
        raise ConfigError(
            found=f"logging.peak_tflops = {peak_tflops}",
            required="the peak of one device in TFLOP/s",
            remedy="set logging.peak_tflops, or do not ask for MFU",
        )
    return flops / (seconds * num_devices * peak_tflops * 1e12)
