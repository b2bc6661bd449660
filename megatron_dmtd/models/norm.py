"""The norms of the model, on every device: RMSNorm, and division by the Euclidean norm."""

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


class UnitNorm(torch.nn.Module):
    """Division by the Euclidean norm of the last dimension. It has no parameters."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, norm: NormSpec) -> None:
        super().__init__()
        self.eps = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with vectors of norm 1."""
        return unit(x, self.eps)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same in fp32, or in fp64 if it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()


class _Unit(torch.autograd.Function):
    """x / sqrt(sum x^2 + eps), where each rank of `group` holds a part of the vector that is divided.

    The sum is over all parts, so each rank's output depends on every rank's input: both the sum of squares and, in the backward
    pass, the product of the gradient with the output are added up over the ranks. (Megatron's `reduce_from` passes gradients
    through, which is right only where all ranks go on with the same sum and the same loss.)
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, group: Any) -> torch.Tensor:
        whole = wide(x)
        squares = _added_up(whole.square().sum(-1, keepdim=True), group)
        inverse = torch.rsqrt(squares + eps)
        ctx.save_for_backward(x, inverse)
        ctx.group = group
        return (whole * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        gradient, divided = wide(gradients[0]), wide(x) * inverse
        along = _added_up((gradient * divided).sum(-1, keepdim=True), ctx.group)
        return ((gradient - divided * along) * inverse).to(x.dtype), None, None


def _added_up(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(x, group=group)
    return x


def unit(x: torch.Tensor, eps: float, *, group: Any = None) -> torch.Tensor:
    """`x` divided by its norm over the last dimension, and over the tensor-parallel ranks of `group` among which it is split."""
    divided: torch.Tensor = _Unit.apply(x, eps, group)
    return divided


def norm_spec(norm: NormSpec | None) -> ModuleSpec | type:
    """The norm, or an identity if there is none."""
    if norm is None:
        return IdentityOp
    return ModuleSpec(module=RMSNorm if norm.kind == "rms" else UnitNorm, params={"norm": norm})
