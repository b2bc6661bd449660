"""Settings of an engine, and their ranges. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_dmtd.cycle import complete_length
from megatron_dmtd.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine decodes, independent of the model."""

    max_batch: int = 8
    """Sequences decoded at once; more wait."""
    max_length: int | None = None
    """Most tokens of a prompt plus its output. Default: the model's longest document, or less if the K/V store holds less."""
    cache_tokens: int | None = None
    """Tokens that the K/V store holds. Default: `max_batch` sequences of full length, if `cache_bytes` allows that."""
    cache_bytes: int = 2 * 2**30
    """Memory of the K/V store, if `cache_tokens` is not given."""
    page_size: int = 16
    """Tokens per page; whole cycles."""
    chunk_tokens: int = 512
    """Most prompt tokens computed per step, over all requests."""
    align_heads: bool = True
    """Align the cycle heads of all requests, so that parallel layers run once per cycle for all of them."""
    prefix_caching: bool = True
    """Keep pages of finished requests for later ones with the same beginning."""
    drop_aware_eviction: bool = True
    """Evict first what the cache operations of all running requests have dropped; False, for comparison: it goes last."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """"native": compiled C for steps of few rows (fp32 on a CPU); "torch": torch alone; "auto": native where it can be."""
    bf16_products: bool = False
    """Multiply prompts and batches in bfloat16, with matrices that are kept in it: more than eight rows at once are rounded to
    bfloat16, summed in fp32, and their products rounded. Faster on CPUs with avx512_bf16 or AMX; needs native kernels.
    """
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
        if not isinstance(self.bf16_products, bool):
            raise ConfigError(
                found=f"bf16_products={self.bf16_products!r}", required="True or False", remedy="change bf16_products"
            )
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


def require_directory(path: Path) -> None:
    """Accept the directory of a model, or raise `CheckpointError`: at once, before torch is imported."""
    if not path.is_dir():
        raise CheckpointError(
            found=f"no directory {path}",
            required="a model directory on this machine",
            remedy="correct the path, or download or export the model first",
        )


def checked_config(config: object) -> EngineConfig:
    """`config`, if it is one and its values are possible. Raises `ConfigError`."""
    if not isinstance(config, EngineConfig):
        found = f"a config of type {type(config).__name__}"
        raise ConfigError(found=found, required="EngineConfig", remedy="for example, pass EngineConfig(max_batch=8)")
    config.check()
    return config
