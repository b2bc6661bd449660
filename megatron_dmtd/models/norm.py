"""RMSNorm for every norm of the model, on every device."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with the mark that makes Megatron sum its gradient over tensor-parallel ranks under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism (megatron-core 0.16.1).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
