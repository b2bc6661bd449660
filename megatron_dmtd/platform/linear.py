"""Megatron's parallel linear layers on a CPU, through `products`.

Stand-ins for the two functions of `megatron.core.tensor_parallel.layers` (0.16.1) in which ColumnParallelLinear,
RowParallelLinear and the output layer multiply. They communicate as the originals do, at the same places; only the three products
are ours. Deferred weight gradients, and gradients added by Apex's CUDA kernels, are not supported: nothing here uses them.

Hidden states are Megatron's `[s, b, h]`; with sequence parallelism a rank holds its share of the first dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_dmtd.platform import products
from megatron_dmtd.platform.choices import Form


class LinearOnCPU(torch.autograd.Function):
    """See `LinearWithGradAccumulationAndAsyncCommunication`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: None,
        wgrad_deferral_limit: int | None,
        tp_group: Any,
    ) -> torch.Tensor:
        """The output `[s, b, outputs of this rank]`."""
        assert not gradient_accumulation_fusion and grad_output_buffer is None, "neither exists on a CPU"
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, tp_group
        ctx.allreduce_dgrad, ctx.sequence_parallel = allreduce_dgrad, sequence_parallel
        whole, _ = _gathered(x, tp_group, wait=True) if sequence_parallel else (x, None)
        return _forward(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, weight and bias. The ranks exchange theirs of the input while that of the weight is computed."""
        x, weight = ctx.saved_tensors
        whole, gathering = _gathered(x, ctx.group, wait=False) if ctx.sequence_parallel else (x, None)
        grad_x = products.input_grad(grad, weight)
        exchange = None
        if gathering is not None:
            gathering.wait()
        if ctx.allreduce_dgrad:
            exchange = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        elif ctx.sequence_parallel:
            sent, grad_x = grad_x, torch.empty_like(x)
            exchange = dist.reduce_scatter_tensor(grad_x, sent, group=ctx.group, async_op=True)
        grad_weight = products.weight_grad(grad, whole)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        if exchange is not None:
            exchange.wait()
        return grad_x, grad_weight, grad_bias, *[None] * 6


class FrozenLinearOnCPU(torch.autograd.Function):
    """See `LinearWithFrozenWeight`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, allreduce_dgrad: bool, tp_group: Any
    ) -> torch.Tensor:
        """The output `[s, b, outputs of this rank]`."""
        ctx.save_for_backward(weight)
        ctx.allreduce_dgrad, ctx.group = allreduce_dgrad, tp_group
        return _forward(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the input alone."""
        (weight,) = ctx.saved_tensors
        grad_x = products.input_grad(grad, weight)
        if ctx.allreduce_dgrad:
            dist.all_reduce(grad_x, group=ctx.group)
        return grad_x, None, None, None, None


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As Megatron does, the bias is added to the rounded product."""
    out = products.product(x, weight, Form.FORWARD)
    return out if bias is None else out + bias


def _gathered(x: torch.Tensor, group: Any, *, wait: bool) -> tuple[torch.Tensor, Any]:
    """The sequence of all ranks, in Megatron's buffer for it, and the work that fills it."""
    from megatron.core.parallel_state import get_global_memory_buffer

    whole = get_global_memory_buffer().get_tensor([x.shape[0] * group.size(), *x.shape[1:]], x.dtype, "mpu")
    work = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=not wait)
    return whole, work
