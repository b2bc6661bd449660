"""Agreement between ranks outside the model: whether any of them has to stop, and what went wrong on any of their disks.

A rank that raises alone leaves the others waiting for it. So everything that may fail on, or happen to, a single rank goes
through here, and every rank reaches the same decision at the same place.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_dmtd.errors import DMTDError


def any_rank(flags: tuple[bool, ...], *, device: torch.device) -> tuple[bool, ...]:
    """For each flag, whether it is set on any rank. One small all-reduce; all ranks must call."""
    found_F = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(found_F, op=torch.distributed.ReduceOp.MAX)
    return tuple(bool(flag) for flag in found_F.tolist())


def gathered(value: Any) -> list[Any]:
    """Each rank's value, by rank, on every rank. All ranks must call."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def gathered_on_first(value: Any) -> list[Any]:
    """Each rank's value, by rank, on rank 0; an empty list elsewhere. All ranks must call."""
    is_first = torch.distributed.get_rank() == 0
    values: list[Any] = [None] * torch.distributed.get_world_size() if is_first else []
    torch.distributed.gather_object(value, values if is_first else None)
    return values


def raise_together(error: DMTDError | None) -> None:
    """Raise the first rank's error on every rank, if any has one. All ranks must call."""
    plain = gathered((type(error), error.found, error.required, error.remedy) if error is not None else None)
    for rank, found in enumerate(plain):
        if found is not None:
            kind, *words = found
            raise kind(found=f"rank {rank}: {words[0]}", required=words[1], remedy=words[2])


def broadcast_from_first(value: Any) -> Any:
    """Rank 0's value on every rank. All ranks must call."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
