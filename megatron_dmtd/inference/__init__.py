"""Decoding: continuous batching over paged pools, with one pass over the parallel layers per cycle. Never imports Megatron."""

from megatron_dmtd.inference.config import EngineConfig
from megatron_dmtd.inference.engine import Engine
from megatron_dmtd.inference.requests import Completion, Event
from megatron_dmtd.inference.sampler import SamplingParams
from megatron_dmtd.inference.scoring import score

__all__ = ["Completion", "Engine", "EngineConfig", "Event", "SamplingParams", "score"]
