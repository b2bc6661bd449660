"""Products of few rows and a weight matrix: the fastest of several ways, found by measuring them on this machine.

All of them read the weights as they are stored, `[out, in]`, so that no second copy is needed. Up to eight rows the native
kernel is bound by reading the weights, and the others can only be slower; which one wins beyond that is measured.

Shape legend: R rows.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

#: At most so many rows always go the native way: on a busy machine a measurement would choose at random.
FEW_ROWS = 8
#: Numbers of rows that are measured; a product uses the way that won at the next larger one.
ROW_COUNTS = (12, 16, 24, 32, 64)
#: Calls per way and number of rows; the fastest counts, since other work on the machine only makes calls slower.
TRIALS = 5
#: Another way is taken only where it takes less than this share of the native kernel's time: measurements are never quiet.
CLEARLY_FASTER = 0.9
#: More rows than the largest of `ROW_COUNTS`: torch's.
LARGE = "linear"
#: Measurements of this process, so that all its engines on weights of the same shapes choose alike, and measure once.
_MEASURED_MS: dict[tuple[int, int, tuple[tuple[torch.Size, torch.dtype], ...]], dict[str, float]] = {}


class FastestMatmul:
    """`out = x @ weight.T + bias + residual` in fp32 on the CPU; weights may be stored in bfloat16."""

    def __init__(self, kernels: ctypes.CDLL, weights: list[torch.Tensor], *, max_rows: int) -> None:
        """Measure on `weights`, several so that caches do not hold them."""
        self.kernels = kernels
        self.ways: dict[str, Callable[..., None]] = {
            "native": self._native,
            "linear": self._linear,
            "transposed": self._transposed,
        }
        self.measured_ms: dict[int, dict[str, float]] = {}
        """Milliseconds of each way for all `weights` once, by number of rows."""
        enough = next((count for count in ROW_COUNTS if count >= max_rows), ROW_COUNTS[-1])
        for rows in (count for count in ROW_COUNTS if max_rows > FEW_ROWS and count <= enough):
            key = (rows, torch.get_num_threads(), tuple((weight.shape, weight.dtype) for weight in weights))
            if key not in _MEASURED_MS:
                _MEASURED_MS[key] = fastest_ms(self.ways, weights, rows)
            self.measured_ms[rows] = _MEASURED_MS[key]
        self._chosen = [self._choice(rows) for rows in range(max(self.measured_ms, default=FEW_ROWS) + 1)]

    def _choice(self, rows: int) -> str:
        if rows <= FEW_ROWS:
            return "native"
        times = self.measured_ms[next(count for count in self.measured_ms if count >= rows)]
        best = min(times, key=lambda name: times[name])
        return best if times[best] < CLEARLY_FASTER * times["native"] else "native"

    def way(self, rows: int) -> str:
        """Name of the way that products of that many rows go."""
        return self._chosen[rows] if rows < len(self._chosen) else LARGE

    def into(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the product to `out`, which may be `residual`. All contiguous."""
        self.ways[self.way(x.shape[0])](out, x, weight, bias, residual)
        return out

    def _native(self, out, x, weight, bias, residual) -> None:
        self.kernels.dmtd_matmul(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            weight.shape[0],
            weight.dtype == torch.bfloat16,
        )

    @staticmethod
    def _linear(out, x, weight, bias, residual) -> None:
        weight = weight.to(x.dtype)
        if residual is None and bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            product = functional.linear(x, weight, bias)
            out.copy_(product) if residual is None else torch.add(residual, product, out=out)

    @staticmethod
    def _transposed(out, x, weight, bias, residual) -> None:
        product = (weight.to(x.dtype) @ x.t().contiguous()).t()
        if bias is not None:
            product = product + bias
        out.copy_(product) if residual is None else torch.add(residual, product, out=out)


def fastest_ms(ways: Mapping[str, Callable[..., None]], weights: list[torch.Tensor], rows: int) -> dict[str, float]:
    """Milliseconds of each way for one product with each of `weights`. Ways take turns, so that all meet the same machine."""
    inputs = [torch.zeros(rows, weight.shape[1]).normal_(generator=torch.Generator().manual_seed(0)) for weight in weights]
    outputs = [torch.empty(rows, weight.shape[0]) for weight in weights]
    # One thread's own time does not count what other programs take from it; several threads can only be timed from outside.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best_s = dict.fromkeys(ways, float("inf"))
    for _ in range(TRIALS):
        for name, way in ways.items():
            start = clock()
            for out, x, weight in zip(outputs, inputs, weights):
                way(out, x, weight, None, None)
            best_s[name] = min(best_s[name], clock() - start)
    return {name: 1e3 * seconds for name, seconds in best_s.items()}
