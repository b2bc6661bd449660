"""RMSNorm for every norm of the model, on every device."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dmtd.architecture import NormSpec


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with the mark that makes Megatron sum its gradient over tensor-parallel ranks under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism (megatron-core 0.16.1).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, *, norm: NormSpec | None = None) -> None:
        """`norm` is the decoder's own; without it, `eps`, Megatron's single value for the whole model, is used."""
        super().__init__(hidden_size, eps=eps if norm is None else norm.eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_spec(norm: NormSpec | None) -> ModuleSpec | type:
    """The norm, or an identity if there is none."""
    return IdentityOp if norm is None else ModuleSpec(module=RMSNorm, params={"norm": norm})
