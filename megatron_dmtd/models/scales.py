"""Learned factors per channel (`ScaleSpec`) as parameters of Megatron's modules."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from megatron_dmtd.architecture import ScaleSpec
from megatron_dmtd.models.norm import wide


def scale_parameter(scale: ScaleSpec, width: int, config: Any, *, is_split: bool) -> torch.nn.Parameter:
    """The stored numbers of `width` channels; `is_split`: these are a tensor-parallel rank's share, else every rank has them all.

    `initial_value` on it is what `initialization` fills it with.
    """
    parameter = torch.nn.Parameter(torch.full((width,), scale.initial, dtype=config.params_dtype))
    parameter.initial_value = scale.initial  # type: ignore[attr-defined]
    if is_split:
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    else:
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def factor(stored: torch.Tensor, scale: ScaleSpec) -> torch.Tensor:
    """What the channels are multiplied by, in fp32 or wider."""
    base = wide(stored) * scale.multiplier
    return base if scale.power == 1 else base**scale.power


def split_scales(
    module: torch.nn.Module, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None, *, tp_group: Any
) -> ShardedStateDict:
    """The sharded state of a module's own scales that are split over tensor-parallel ranks; Megatron would call them replicas."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    return {
        prefix + name: make_tp_sharded_tensor_for_checkpoint(
            tensor=parameter,
            key=prefix + name,
            tp_axis=0,
            prepend_offsets=sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, parameter in module.named_parameters(recurse=False)
        if getattr(parameter, "tensor_model_parallel", False)
    }
