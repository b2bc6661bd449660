"""The one place that multiplies matrices on a CPU: `linear`, for training and the engine, each time by the fastest exact product.

torch carries two libraries, and which one is faster depends on the processor: MKL uses AVX2 on AMD's, oneDNN whatever there is.
For each type, form and number of rows, `choices.py` measures them once per machine; products of few operations always go through
torch, where the call costs more than the arithmetic. Exact: every product sums in fp32 or wider, and fp32 operands are never
rounded to a narrower type.

On a GPU, and for types other than fp32 and bf16, everything goes through torch.

Shape legend: R rows of a product, E its inputs (summed over), O its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from megatron_dmtd.infra.native import cpu_facts
from megatron_dmtd.platform.choices import Choices, Form, Product, choose, record_path

#: Multiplications below which the call itself decides: torch's is the cheapest.
SMALL = 1 << 22
TYPES = (torch.float32, torch.bfloat16)


def _torch(x: torch.Tensor, weight_OE: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, weight_OE, bias_O)


def _onednn(x: torch.Tensor, weight_OE: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight_OE, bias_O, "none", [], "")


def _widened(x: torch.Tensor, weight_OE: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """A bf16 product where the processor has no instructions for it: the same sums, in fp32, rounded once."""
    bias = None if bias_O is None else bias_O.float()
    return product(x.float(), weight_OE.float(), Form.FORWARD, bias).to(x.dtype)


#: By the names that `choices` records; torch's own comes first.
PRODUCTS: dict[str, Product] = {"torch": _torch, "onednn": _onednn, "widened": _widened}


@functools.cache
def has_bf16_instructions() -> bool:
    """Whether the processor multiplies bf16; if so, faster than fp32."""
    flags = {flag for fact in cpu_facts() for flag in fact.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def candidates(dtype: torch.dtype) -> Mapping[str, Product]:
    """The products of a type among which a measurement chooses on this machine."""
    if dtype == torch.bfloat16 and not has_bf16_instructions():
        names = ["widened"]  # by rule: without instructions, torch's own take up to fifty times as long
    elif torch.backends.mkldnn.is_available() and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        names = ["torch", "onednn"]
    else:
        names = ["torch"]
    return {name: PRODUCTS[name] for name in names}


class _Run:
    """What this process works for."""

    folder: Path | None = None


def keep_choices_in(folder: Path | None) -> None:
    """Go by the choices that are kept in a run's folder, and keep them there as soon as they are needed. None: no run."""
    _Run.folder = folder


def choices_of_this_machine() -> Choices:
    """The recorded decisions; measured when this machine first needs them."""
    return _choices(_Run.folder)


@functools.cache
def _choices(run_folder: Path | None) -> Choices:
    return choose(candidates, record_path(), run_folder)


def product(x: torch.Tensor, weight_OE: torch.Tensor, form: Form, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` of shape `[..., E]`, both of one type and any strides."""
    if x.dtype not in TYPES or x.device.type != "cpu":
        return _no_view(_torch(x, weight_OE, bias_O))
    if x.numel() * weight_OE.shape[0] < SMALL:
        small = _torch if x.dtype != torch.bfloat16 or has_bf16_instructions() else _widened
        return _no_view(small(x, weight_OE, bias_O))
    rows = x.shape[-1] if form is Form.WEIGHT_GRAD else x.numel() // x.shape[-1]
    return _no_view(PRODUCTS[choices_of_this_machine().name(x.dtype, form, rows)](x, weight_OE, bias_O))


def _no_view(x: torch.Tensor) -> torch.Tensor:
    """`x`, no longer marked as a view: autograd forbids changing a view that a custom function returns, as the loss does."""
    return torch.ops.aten._unsafe_view.default(x, x.shape) if x._is_view() else x


def linear(x: torch.Tensor, weight_OE: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` of shape `[..., E]`. Differentiable; gradients go through the same products."""
    if x.device.type != "cpu" or x.dtype not in TYPES or weight_OE.dtype != x.dtype:
        return functional.linear(x, weight_OE, bias_O)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight_OE, bias_O)):
        return _Linear.apply(x, weight_OE, bias_O)
    return product(x, weight_OE, Form.FORWARD, bias_O)


def input_grad(grad: torch.Tensor, weight_OE: torch.Tensor) -> torch.Tensor:
    """Gradient `[..., E]` of the input of `linear`, from that of its output."""
    return product(grad, weight_OE.t(), Form.INPUT_GRAD)


def weight_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient `[O, E]` of the weight of `linear`, from that of its output and its input."""
    return product(_rows(grad).t(), _rows(x).t(), Form.WEIGHT_GRAD)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OE: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OE)
        return product(x, weight_OE, Form.FORWARD, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OE = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            input_grad(grad, weight_OE) if for_x else None,
            weight_grad(grad, x) if for_weight else None,
            _rows(grad).sum(0) if for_bias else None,
        )
