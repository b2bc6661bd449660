"""The weights of a running training, for an engine: called between two steps, on every rank."""

from __future__ import annotations

from megatron_dmtd.training.state import RunState
from megatron_dmtd.weights.ranks import stream_ranks
from megatron_dmtd.weights.streams import WeightStream


def live_weights(run: RunState) -> WeightStream:
    """One stream of (Hugging Face's name, whole tensor) of the weights as the last step left them. Collective: see `ranks`."""
    overlaps = run.config.parallel.overlap_param_gather
    if overlaps:
        for chunk in run.wrapped:
            chunk.disable_forward_pre_hook()  # completes the gather that the next forward pass would wait for
    try:
        yield from stream_ranks(run.models)
    finally:
        if overlaps:
            for chunk in run.wrapped:
                chunk.enable_forward_pre_hook()
