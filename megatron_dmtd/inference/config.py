"""How an engine is to decode: its settings, their ranges, and what the words for types and devices stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_dmtd.cycle import complete_length
from megatron_dmtd.errors import CapabilityError, ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine decodes, whatever the model."""

    max_batch: int = 8
    """Sequences decoded at once; more wait."""
    max_length: int | None = None
    """Tokens of a prompt and its output at most. Default: what the model was made for, or less if the K/V store holds less."""
    cache_tokens: int | None = None
    """Tokens that the K/V store holds. Default: `max_batch` sequences of full length, as far as `cache_bytes` goes."""
    cache_bytes: int = 2 * 2**30
    """Memory of the K/V store, if `cache_tokens` is not given."""
    page_size: int = 16
    """Tokens per page; whole cycles."""
    chunk_tokens: int = 512
    """Prompt tokens computed per step at most, all requests together."""
    align_heads: bool = True
    """Let cycle heads of all requests meet in one step, so that parallel layers run once per cycle for all of them."""
    prefix_caching: bool = True
    """Keep pages of finished requests for later ones with the same beginning."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """"native": compiled C for steps of few rows (fp32 on a CPU); "torch": torch alone; "auto": native where it can be."""
    cuda_graphs: Literal["auto", "on", "off", "shapes"] = "auto"
    """Decode from CUDA graphs, one for each of a few shapes of a step; "auto": on CUDA. "shapes": the same shapes without graphs,
    on any device, for tests and debugging.
    """

    def check(self) -> None:
        """Accept the values, or raise `ConfigError`."""
        for name in ("max_batch", "chunk_tokens", "page_size", "cache_bytes", "max_length", "cache_tokens"):
            value = getattr(self, name)
            may_be_none = name in ("max_length", "cache_tokens")
            if not (value is None and may_be_none) and not (isinstance(value, int) and value >= 1):
                required = "an integer of at least 1" + (", or None" if may_be_none else "")
                raise ConfigError(found=f"{name}={value!r}", required=required, remedy=f"change {name}")
        if self.kernels not in ("auto", "native", "torch"):
            raise ConfigError(found=f"kernels={self.kernels!r}", required="auto, native or torch", remedy="change kernels")
        if self.cuda_graphs not in ("auto", "on", "off", "shapes"):
            found = f"cuda_graphs={self.cuda_graphs!r}"
            raise ConfigError(found=found, required="auto, on, off or shapes", remedy="change cuda_graphs")

    def check_pages(self, cycle_length: int) -> None:
        """Accept the page size for a model of such cycles, or raise `ConfigError`."""
        if complete_length(self.page_size, cycle_length) != self.page_size:
            raise ConfigError(
                found=f"page_size={self.page_size} with cycles of {cycle_length} tokens",
                required="pages of whole cycles",
                remedy="choose a multiple of the cycle length",
            )


def checked_config(config: object) -> EngineConfig:
    """`config`, if it is one and its values are possible. Raises `ConfigError`."""
    if not isinstance(config, EngineConfig):
        found = f"a config of type {type(config).__name__}"
        raise ConfigError(found=found, required="EngineConfig", remedy="write for example EngineConfig(max_batch=8)")
    config.check()
    return config


def dtype_of(name: str) -> torch.dtype:
    """The type of weights, activations and caches. Raises `ConfigError` for an unknown name."""
    if name not in DTYPES:
        raise ConfigError(found=f"dtype {name!r}", required=f"one of {sorted(DTYPES)}", remedy="change dtype")
    return DTYPES[name]


def matrix_dtype_of(name: str | None, dtype: str) -> torch.dtype | None:
    """The type of matrices and embeddings where it differs from `dtype`. Raises `ConfigError` for other mixtures."""
    if name is None or name == dtype:
        return None
    if (name, dtype) != ("bfloat16", "float32"):
        raise ConfigError(
            found=f"matrix_dtype {name!r} with dtype {dtype!r}",
            required="bfloat16 with float32, or the same type",
            remedy="leave matrix_dtype out",
        )
    return torch.bfloat16


def device_of(name: str | None) -> torch.device:
    """The device of that name; without one, the accelerator if there is one, else the CPU. Raises `CapabilityError`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    count = torch.accelerator.device_count() if accelerator else 0
    is_here = device is not None and accelerator is not None and device.type == accelerator.type and (device.index or 0) < count
    if device is None or not (is_here or device.type == "cpu"):
        raise CapabilityError(
            found=f"device {name!r}, and {f'{count} of {accelerator.type}' if accelerator else 'no accelerator'} here",
            required="a device of this machine",
            remedy="use device='cpu'",
        )
    return device
