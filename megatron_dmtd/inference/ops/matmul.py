"""Products of a pass and a dense matrix on the CPU, each by the fastest kernel.

Up to eight rows our own kernel is bound by reading the weights, and others can only be slower. A piece of a prompt has hundreds
of rows, and goes to `platform.products`. Between, which one wins is measured on the model's own weights. All of them read the
weights as they are stored, `[out, in]`: no second copy of the model is kept. For more than 24 rows our own kernel copies a few
rows of a matrix at a time (`native/panels.c`); weights in bfloat16 are widened for `platform.products`, some at a time.

Shape legend: R rows of a pass.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from megatron_dmtd.inference.ops.linear import DenseLinear, Linear
from megatron_dmtd.platform import products

#: Up to this many rows our own kernel is always used: on a busy machine a measurement would choose at random.
FEW_ROWS = 8
#: Numbers of rows that are measured; a product uses the kernel that was fastest at the next larger one.
ROW_COUNTS = (12, 16, 24, 32, 64, 128)
#: Calls per kernel and number of rows; the fastest counts, since other work on the machine only makes calls slower.
TRIALS = 5
#: Another kernel is used only if it takes less than this fraction of our own's time: measurements are noisy.
CLEARLY_FASTER = 0.95
#: The kernel of more than `FEW_ROWS` rows if products in bfloat16 are wanted: by rule, since its numbers are other ones.
ROUNDED = "rounded"
#: More rows than the largest of `ROW_COUNTS`.
LARGE = "products"
#: Weights in bfloat16 that are widened at once: 32 MiB.
WIDE_BLOCK = 1 << 23
#: Measurements of this process, so that all its engines on weights of the same shapes choose the same kernels and measure once.
_MEASURED_MS: dict[tuple[int, int, tuple[tuple[torch.Size, torch.dtype], ...]], dict[str, float]] = {}

#: (out, x, linear, residual): gives `residual + x @ weight.T + bias`, in `out` or in memory of its own. `out` may be `residual`.
#: All contiguous.
DenseKernel = Callable[[torch.Tensor, torch.Tensor, DenseLinear, torch.Tensor | None], torch.Tensor]


class Product(Protocol):
    """Multiplies with the linear layers of one format."""

    def into(self, out: torch.Tensor, x: torch.Tensor, linear: Linear, residual: torch.Tensor | None) -> torch.Tensor:
        """`residual + x @ weight.T + bias`, in `out`, which may be `residual`, or in memory of its own. All contiguous."""


class DenseProduct:
    """Products in fp32 with fp32 or bf16 weights; if wanted, those of more than `FEW_ROWS` rows and bf16 weights in bf16."""

    def __init__(self, library: ctypes.CDLL, linears: Sequence[DenseLinear], *, max_rows: int, in_bfloat16: bool = False) -> None:
        """Measure on `linears`, several so that caches do not hold them."""
        self.library, self.in_bfloat16 = library, in_bfloat16
        self.kernels: dict[str, DenseKernel] = {
            "native": self._native,
            "products": self._products,
            "transposed": _transposed,
        }
        if in_bfloat16:
            max_rows = FEW_ROWS  # nothing to choose from
        self._native_arguments: dict[Linear, tuple[int, int | None, int, int, bool]] = {}
        self._wide = torch.empty(0)
        self.measured_ms: dict[int, dict[str, float]] = {}
        """Milliseconds of each kernel for all `linears` once, by number of rows."""
        enough = next((count for count in ROW_COUNTS if count >= max_rows), ROW_COUNTS[-1])
        for rows in (count for count in ROW_COUNTS if max_rows > FEW_ROWS and count <= enough):
            key = (rows, torch.get_num_threads(), tuple((linear.weight.shape, linear.weight.dtype) for linear in linears))
            if key not in _MEASURED_MS:
                _MEASURED_MS[key] = fastest_ms(self.kernels, linears, rows)
            self.measured_ms[rows] = _MEASURED_MS[key]
        self._chosen = [self._choice(rows) for rows in range(max(self.measured_ms, default=FEW_ROWS) + 1)]

    def _choice(self, rows: int) -> str:
        if rows <= FEW_ROWS:
            return "native"
        times = self.measured_ms[next(count for count in self.measured_ms if count >= rows)]
        best = min(times, key=lambda name: times[name])
        return best if times[best] < CLEARLY_FASTER * times["native"] else "native"

    def kernel_for(self, rows: int) -> str:
        """Name of the kernel of products of that many rows."""
        if self.in_bfloat16 and rows > FEW_ROWS:
            return ROUNDED
        return self._chosen[rows] if rows < len(self._chosen) else LARGE

    def into(self, out: torch.Tensor, x: torch.Tensor, linear: Linear, residual: torch.Tensor | None) -> torch.Tensor:
        """See `Product`."""
        assert isinstance(linear, DenseLinear), type(linear)
        rows = len(x)
        if rows <= FEW_ROWS:
            return self._native(out, x, linear, residual)
        if self.in_bfloat16:
            return _rounded(out, x, linear, residual)
        return self.kernels[self.kernel_for(rows)](out, x, linear, residual)

    def _native(self, out: torch.Tensor, x: torch.Tensor, linear: DenseLinear, residual: torch.Tensor | None) -> torch.Tensor:
        known = self._native_arguments.get(linear)
        if known is None:  # weights are never moved
            weight, bias = linear.weight, linear.bias
            bias_pointer = None if bias is None else bias.data_ptr()
            known = weight.data_ptr(), bias_pointer, linear.in_features, linear.out_features, weight.dtype == torch.bfloat16
            self._native_arguments[linear] = known
        weight_pointer, bias_pointer, num_in, num_out, is_bf16 = known
        self.library.dmtd_matmul(
            x.data_ptr(),
            weight_pointer,
            bias_pointer,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            len(x),
            num_in,
            num_out,
            is_bf16,
        )
        return out

    def _products(self, out: torch.Tensor, x: torch.Tensor, linear: DenseLinear, residual: torch.Tensor | None) -> torch.Tensor:
        weight, bias = linear.weight, linear.bias
        rows = weight.shape[0] if weight.dtype == x.dtype else max(1, WIDE_BLOCK // weight.shape[1])
        if rows >= weight.shape[0]:
            product = products.linear(x, self._widened(weight, x.dtype), bias)
            return product if residual is None else torch.add(residual, product, out=out)
        for first in range(0, weight.shape[0], rows):
            part = slice(first, first + rows)
            product = products.linear(x, self._widened(weight[part], x.dtype), None if bias is None else bias[part])
            out[:, part] = product if residual is None else residual[:, part] + product
        return out

    def _widened(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of `weight` in a wider type, in memory that the next call reuses."""
        if weight.dtype == dtype:
            return weight
        if weight.numel() > self._wide.numel():
            self._wide = torch.empty(weight.numel(), dtype=dtype)
        return self._wide[: weight.numel()].view_as(weight).copy_(weight)


def _rounded(out: torch.Tensor, x: torch.Tensor, linear: DenseLinear, residual: torch.Tensor | None) -> torch.Tensor:
    """A product in bf16, summed in fp32 and rounded; bias and residual are added in fp32."""
    product = products.linear(x.to(linear.weight.dtype), linear.weight)
    whole = out.copy_(product) if residual is None else torch.add(residual, product, out=out)
    return whole if linear.bias is None else whole.add_(linear.bias)


def _transposed(out: torch.Tensor, x: torch.Tensor, linear: DenseLinear, residual: torch.Tensor | None) -> torch.Tensor:
    product = (linear.weight.to(x.dtype) @ x.t().contiguous()).t()
    if linear.bias is not None:
        product = product + linear.bias
    return out.copy_(product) if residual is None else torch.add(residual, product, out=out)


def fastest_ms(kernels: Mapping[str, DenseKernel], linears: Sequence[DenseLinear], rows: int) -> dict[str, float]:
    """Milliseconds of each kernel for one product with each of `linears`. They take turns, so that all meet the same machine."""
    generator = torch.Generator()
    inputs = [torch.zeros(rows, linear.in_features).normal_(generator=generator.manual_seed(0)) for linear in linears]
    outputs = [torch.empty(rows, linear.out_features) for linear in linears]
    # A single thread's CPU time excludes what other programs take; several threads can only be timed by the wall clock.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best_s = dict.fromkeys(kernels, float("inf"))
    for _ in range(TRIALS):
        for name, kernel in kernels.items():
            start = clock()
            for out, x, linear in zip(outputs, inputs, linears):
                kernel(out, x, linear, None)
            best_s[name] = min(best_s[name], clock() - start)
    return {name: 1e3 * seconds for name, seconds in best_s.items()}
