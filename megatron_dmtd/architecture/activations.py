"""Estimate of the activations that each visit keeps for the backward pass, from the sizes of the layer.

A test compares it with what autograd keeps. Allocator overhead, temporaries and the communication library are not included.
"""

from __future__ import annotations

from megatron_dmtd.architecture.schedule import Schedule, Visit


def visit_activations_per_token(
    schedule: Schedule, visit: Visit, *, on_gpu: bool, tensor: int = 1, sequence_parallel: bool = False
) -> float:
    """Numbers that one visit keeps for the backward pass, per token of one stream and tensor-parallel rank.

    These are inputs and outputs of both norms; the joint projection of queries, keys and values, what their norms and rotation
    keep, the attention's output and log-sum-exp, the rotary angles; the gate and up halves and their product. Without the fused
    kernels of a GPU, norms also keep their normalised inputs, and the gated activation its parts. A visit of two streams keeps
    both attention outputs and their concatenation, and on a GPU the concatenated keys and values of both streams.
    """
    layer = schedule.layer(visit)
    sequence = tensor if sequence_parallel else 1
    queries, keys = layer.attention.query_size, layer.attention.key_size
    unfused = 0 if on_gpu else 1
    query_norm = queries + unfused * (queries + keys) if layer.attention.qk_norm is not None else 0
    attention = (queries + 2 * keys) + query_norm + (queries + keys) + queries + layer.attention.num_attention_heads
    if len(visit.streams) == 2:
        attention += queries + (2 * keys if on_gpu else 0)
    feed_forward = (3 + 2 * unfused) * layer.mlp.intermediate_size
    norms = (4 + 2 * unfused) * schedule.decoder.hidden_size / sequence
    return norms + (attention + feed_forward) / tensor + 4 * layer.attention.head_dim
