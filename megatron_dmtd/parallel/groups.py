"""Process groups of a run: torch.distributed and Megatron's parallel state, from the environment of torchrun or srun."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch

from megatron_dmtd.config import Config
from megatron_dmtd.parallel.placement import Placement, place
from megatron_dmtd.platform import Platform


def world_size_of_environment() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_environment() -> int:
    """Rank that the launcher gave this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def embedding_ranks(placement: Placement) -> Callable[[list[int]], list[int]]:
    """For Megatron: which ranks of a pipeline group hold copies of the embedding table, whose gradients it then sums."""

    def ranks(pipeline_group: list[int], split_rank: int | None = None) -> list[int]:
        return [pipeline_group[rank] for rank in placement.table_ranks]

    return ranks


def _init_torch_distributed(platform: Platform, *, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group(backend=platform.backend, timeout=timeout)
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend=platform.backend, store=store, rank=0, world_size=1, timeout=timeout)


def init_parallel(config: Config, platform: Platform) -> None:
    """Start torch.distributed where it is not yet started, Megatron's groups, and the random states of this layout."""
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        _init_torch_distributed(platform, timeout_s=config.parallel.timeout_s)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tensor,
        pipeline_model_parallel_size=config.parallel.pipeline,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_stages if config.parallel.virtual_stages > 1 else None,
        get_embedding_ranks=embedding_ranks(place(config)),
        distributed_timeout_minutes=max(1, int(config.parallel.timeout_s // 60)),
    )
    torch.manual_seed(config.training.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)


def shut_down() -> None:
    """Leave Megatron's groups and torch.distributed."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
