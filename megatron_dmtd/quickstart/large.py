"""The speed of a model whose weights do not fit into the processor's caches, against what its memory allows.

The models that the quickstart trains fit, so that their speed says little about real ones. Here weights are random: speed does
not depend on their values. Decoding one request, every weight is read from memory for each token, or in the parallel layers for
each cycle: bytes are the limit.

Shape legend: N tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from megatron_dmtd.architecture import decoder_tensors, make_schedule
from megatron_dmtd.architecture.flops import decoding_weights
from megatron_dmtd.architecture.tensors import num_parameters
from megatron_dmtd.cycle import ORDINARY
from megatron_dmtd.families import read_fields
from megatron_dmtd.hf import DMTDQwen3Config
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from megatron_dmtd.inference.weights import ModelWeights, build_model
from megatron_dmtd.platform import Platform
from megatron_dmtd.platform.machine import read_bytes_per_s
from megatron_dmtd.quickstart.parts import progress_bar
from megatron_dmtd.quickstart.plan import CONTROL, DMTD, Plan

_PROMPT_N = tuple(range(1, 31))
_PARAMS = SamplingParams(ignore_eos=True)


def random_model(plan: Plan, platform: Platform) -> ModelWeights:
    """The plan's large model with random weights, in fp32."""
    description = read_fields(DMTDQwen3Config(**plan.large_fields()).to_dict())
    shapes = decoder_tensors(description.decoder)
    # Uniform numbers come several times faster than normal ones.
    generator = torch.Generator(device=platform.device).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        size = shapes[name].shape
        if len(size) == 1:
            return torch.ones(size, device=platform.device)
        return torch.empty(size, device=platform.device).uniform_(-0.03, 0.03, generator=generator)

    return build_model(description.schedule, read)


def _seconds(engine: Engine, new_tokens: int) -> float:
    """Seconds from the first token to the last."""
    moments = [time.perf_counter() for _ in engine.stream(_PROMPT_N, max_new_tokens=new_tokens + 1, params=_PARAMS)]
    return moments[-1] - moments[0]


def measure(plan: Plan, platform: Platform, *, new_tokens: int = 32) -> dict[str, Any]:
    """Tokens per second in cycles and as an ordinary decoder, alternately, with the bytes that each reads per token."""
    bandwidth = read_bytes_per_s(platform.device)
    cycled = random_model(plan, platform)
    ordinary = dataclasses.replace(cycled, schedule=make_schedule(cycled.schedule.decoder, ORDINARY))
    config = EngineConfig(max_batch=1, prefix_caching=False, max_length=len(_PROMPT_N) + 2 * new_tokens)
    models = {DMTD: cycled, CONTROL: ordinary}
    engines = {name: Engine(model, config) for name, model in models.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    with progress_bar(total=len(engines) * (plan.timed_runs + 1), unit="run", desc="  large model") as bar:
        for run in range(plan.timed_runs + 1):
            for name, engine in engines.items():
                seconds = _seconds(engine, new_tokens)
                if run > 0:  # the first one warms up
                    rates[name].append(new_tokens / seconds)
                bar.update()
    return {
        "parameters": num_parameters(cycled.schedule.decoder),
        "threads": torch.get_num_threads(),
        "new_tokens": new_tokens,
        "read_bytes_per_s": bandwidth,
        "models": {
            name: {
                "bytes_per_token": 4 * decoding_weights(models[name].schedule),
                "tokens_per_s": statistics.median(rates[name]),
                "tokens_per_s_runs": rates[name],
            }
            for name in models
        },
    }
