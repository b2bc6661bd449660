"""Decoding: continuous batching over a paged K/V store, with one pass over the parallel layers per cycle. No Megatron here."""

from megatron_dmtd.inference.config import EngineConfig
from megatron_dmtd.inference.engine import Engine
from megatron_dmtd.inference.requests import Completion, Event
from megatron_dmtd.inference.sampler import SamplingParams
from megatron_dmtd.inference.scoring import score

__all__ = ["Completion", "Engine", "EngineConfig", "Event", "SamplingParams", "score"]
