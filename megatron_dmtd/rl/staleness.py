"""Which tokens are recent enough to learn from, by the version of the weights that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch


@overload
def fresh(versions: int, current: int, max_version_diff: int) -> bool: ...
@overload
def fresh(versions: torch.Tensor | Sequence[int], current: int, max_version_diff: int) -> torch.Tensor: ...
def fresh(versions: int | torch.Tensor | Sequence[int], current: int, max_version_diff: int) -> bool | torch.Tensor:
    """Whether current - version <= max_version_diff: a bool for one version, a bool tensor of the same shape for many."""
    if isinstance(versions, int):
        return current - versions <= max_version_diff
    return current - torch.as_tensor(versions) <= max_version_diff
