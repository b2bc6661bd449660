"""From a model and a config to the parts of an engine: how steps are executed, on which kernels, and how large the pools are."""

from __future__ import annotations

import dataclasses

import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference.config import EngineConfig
from megatron_dmtd.inference.graphs import require_cuda
from megatron_dmtd.inference.kv.store import KeyValuePool, Pools, PoolShape
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.native_ops import NativeOps
from megatron_dmtd.inference.runner import StepMode
from megatron_dmtd.inference.weights import ModelWeights


def step_mode(config: EngineConfig, device: torch.device) -> StepMode:
    """How steps are executed. Raises `CapabilityError` if graphs are asked for where there are none."""
    if config.cuda_graphs == "on":
        require_cuda(device)
    if config.cuda_graphs == "shapes":
        return "static"
    return "graphs" if device.type == "cuda" and config.cuda_graphs != "off" else "dynamic"


def native_refusal(model: ModelWeights, config: EngineConfig) -> str:
    """Why the native kernels cannot be used, or are not wanted; empty if they are used."""
    if config.kernels == "torch":
        return "kernels='torch'"
    try:
        NativeOps.check(model.shape, dtype=model.dtype, device=model.device, page_size=config.page_size)
        load_kernels()
    except CapabilityError as error:
        if config.kernels == "native":
            raise
        return error.found
    return ""


def make_pools(model: ModelWeights, config: EngineConfig, *, num_scratch_pages: int) -> tuple[Pools, int]:
    """The pools, and the length that a request may have."""
    shape, method = model.shape, model.method
    wanted = shape.max_position_embeddings if config.max_length is None else config.max_length
    if not 2 <= wanted <= shape.max_position_embeddings:
        raise ConfigError(
            found=f"max_length={wanted}",
            required=f"from 2 to the model's max_position_embeddings, {shape.max_position_embeddings}",
            remedy="change max_length",
        )
    layers = {"P": shape.num_parallel_layers, "S": shape.num_layers - shape.num_parallel_layers}
    template = PoolShape(
        num_layers=1,
        num_pages=0,
        num_key_value_heads=shape.num_key_value_heads,
        page_size=config.page_size,
        head_dim=shape.head_dim,
    )
    num_pages = _num_pages(config, wanted, template.page_bytes(model.dtype) * shape.num_layers)
    # Blocks of the last cycle may reach past the last token.
    max_length = min(wanted, method.cycle_start(num_pages * config.page_size))
    if config.max_length is not None and max_length < config.max_length:
        raise ConfigError(
            found=f"pools of {num_pages * config.page_size} tokens for max_length={config.max_length}",
            required="room for one request of max_length tokens",
            remedy="raise cache_tokens or cache_bytes, or lower max_length",
        )
    pools = [
        KeyValuePool(
            dataclasses.replace(template, num_layers=count, num_pages=num_pages if count else 0),
            name=name,
            dtype=model.dtype,
            device=model.device,
            num_scratch_pages=num_scratch_pages,
        )
        for name, count in layers.items()
    ]
    return Pools(*pools), max_length


def _num_pages(config: EngineConfig, max_length: int, page_bytes: int) -> int:
    if config.cache_tokens is not None:
        num_pages = config.cache_tokens // config.page_size
    else:
        pages_per_sequence = -(-max_length // config.page_size) + 1
        num_pages = min(config.max_batch * pages_per_sequence, config.cache_bytes // page_bytes)
    if num_pages < 1:
        raise ConfigError(
            found=f"pools of {num_pages} pages of {config.page_size} tokens ({page_bytes} bytes each)",
            required="at least one page",
            remedy="raise cache_tokens or cache_bytes",
        )
    return num_pages
