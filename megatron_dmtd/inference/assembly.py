"""Makes the parts of an engine from a model and a config: execution mode, kernels, and the K/V store."""

from __future__ import annotations

import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference.config import EngineConfig
from megatron_dmtd.inference.graphs import require_cuda
from megatron_dmtd.inference.kv.codec import PlainCodec
from megatron_dmtd.inference.kv.store import KVStore, page_bytes
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.native_ops import NativeKernels
from megatron_dmtd.inference.runner import StepMode
from megatron_dmtd.inference.weights import ModelWeights
from megatron_dmtd.platform.products import has_bf16_instructions


def step_mode(config: EngineConfig, device: torch.device) -> StepMode:
    """How steps are executed. Raises `CapabilityError` if graphs are requested on a device without them."""
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
        NativeKernels.check(model.schedule.decoder, dtype=model.dtype, device=model.device, page_size=config.page_size)
        load_kernels()
    except CapabilityError as error:
        if config.kernels == "native":
            raise
        return error.found
    return ""


def product_note(model: ModelWeights, config: EngineConfig, kernel_note: str) -> str:
    """Why products in bfloat16 are slow on this machine; empty if there are none, or if they are not.

    Raises:
        ConfigError: They are requested of matrices in another type, or without native kernels (`kernel_note` says why).
    """
    if config.bf16_products and (kernel_note or model.embedding_VX.dtype != torch.bfloat16):
        raise ConfigError(
            found=f"bf16_products with {kernel_note or f'matrices in {model.embedding_VX.dtype}'}",
            required="matrices in bfloat16 under activations in float32, and native kernels",
            remedy="add matrix_dtype='bfloat16', or leave bf16_products out",
        )
    if model.device.type != "cpu" or has_bf16_instructions():
        return ""
    if config.bf16_products:
        return "this processor has no instructions for bfloat16: products of prompts and batches run in fp32 and are rounded"
    if model.dtype == torch.bfloat16:
        return "this processor has no instructions for bfloat16: dtype='bfloat16' is slow here, matrix_dtype='bfloat16' is not"
    return ""


def make_store(model: ModelWeights, config: EngineConfig, *, num_scratch_pages: int) -> tuple[KVStore, int]:
    """The K/V store, and the length that a request may have."""
    schedule, longest = model.schedule, model.schedule.decoder.max_position_embeddings
    wanted = longest if config.max_length is None else config.max_length
    if not 2 <= wanted <= longest:
        raise ConfigError(
            found=f"max_length={wanted}",
            required=f"from 2 to the model's max_position_embeddings, {longest}",
            remedy="change max_length",
        )
    codec = PlainCodec(model.dtype)
    num_pages = _num_pages(config, wanted, page_bytes(schedule, codec, page_size=config.page_size))
    # Blocks of the last cycle may reach past the last token.
    max_length = min(wanted, model.method.cycle_start(num_pages * config.page_size))
    if config.max_length is not None and max_length < config.max_length:
        raise ConfigError(
            found=f"room for {num_pages * config.page_size} tokens in the K/V store, for max_length={config.max_length}",
            required="room for one request of max_length tokens",
            remedy="raise cache_tokens or cache_bytes, or lower max_length",
        )
    store = KVStore(
        schedule,
        codec,
        num_pages=num_pages,
        page_size=config.page_size,
        num_scratch_pages=num_scratch_pages,
        device=model.device,
    )
    return store, max_length


def _num_pages(config: EngineConfig, max_length: int, bytes_per_page: int) -> int:
    if config.cache_tokens is not None:
        num_pages = config.cache_tokens // config.page_size
    else:
        pages_per_sequence = -(-max_length // config.page_size) + 1
        num_pages = min(config.max_batch * pages_per_sequence, config.cache_bytes // bytes_per_page)
    if num_pages < 1:
        raise ConfigError(
            found=f"room for {num_pages} pages of {config.page_size} tokens in the K/V store ({bytes_per_page} bytes each)",
            required="at least one page",
            remedy="raise cache_tokens or cache_bytes",
        )
    return num_pages
