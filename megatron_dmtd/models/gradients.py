"""The end of a step's backward pass: Megatron's reductions, then one sum over all copies of the embedding table.

Megatron itself sums the copies on the first and the last pipeline stage. Here `Embed(x)` is also needed where the sequential
layers begin, so a copy may be on any stage, and with virtual stages two may be on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from megatron_dmtd.models.model import CycleModel


def _unwrapped(chunk: torch.nn.Module) -> CycleModel:
    while not isinstance(chunk, CycleModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def sum_table_gradients(models: Sequence[CycleModel]) -> None:
    """Give every copy of the embedding table the sum of all copies' gradients, so that they stay equal."""
    tables = [table for model in models if (table := model.shared_embedding_or_output_weight()) is not None]
    gradients = [table.main_grad for table in tables if table.requires_grad]  # type: ignore[attr-defined]
    if not gradients or len(models[0].placement.table_stages) == 1:
        return
    total = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    if len(models[0].placement.table_ranks) > 1:
        torch.distributed.all_reduce(total, group=parallel_state.get_embedding_group())
    for gradient in gradients[1:]:
        gradient.copy_(total)


def finalize_gradients(chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """What the pipeline schedules call after the last backward pass of a step.

    The sum over copies is linear, so it may follow the reduction over data-parallel ranks and the division by the number of
    targets. Each copy has its own bucket, so the optimizer shards of all copies cover the same rows.
    """
    finalize_model_grads(list(chunks), num_tokens, **kwargs)
    sum_table_gradients([_unwrapped(chunk) for chunk in chunks])
