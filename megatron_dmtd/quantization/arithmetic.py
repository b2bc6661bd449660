"""Which arithmetic computes the formats of a tensor: the native kernels on the CPU, plain torch elsewhere.

Both give the same bytes.
"""

from __future__ import annotations

import functools
import warnings
from typing import Protocol, cast

import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.quantization import native, reference


class Arithmetic(Protocol):
    """The functions of `reference.py`, which documents them, and of `native.py`."""

    def largest_magnitude(self, x: torch.Tensor) -> torch.Tensor: ...
    def quantize_nvfp4(
        self, x: torch.Tensor, global_scale: torch.Tensor, *, four_over_six: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def dequantize_nvfp4(self, packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor: ...
    def quantize_mxfp4(self, x: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]: ...
    def dequantize_mxfp4(self, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor: ...
    def quantize_mxfp8(self, x: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]: ...
    def dequantize_mxfp8(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor: ...


REFERENCE = cast(Arithmetic, reference)


def arithmetic_for(tensor: torch.Tensor) -> Arithmetic:
    """For a tensor on the CPU the native kernels, if this machine can compile them; a warning, once, if it cannot."""
    return _on_cpu() if tensor.device.type == "cpu" else REFERENCE


@functools.cache
def _on_cpu() -> Arithmetic:
    try:
        native.load_kernels()
    except CapabilityError as error:
        warnings.warn(f"quantisation runs in plain torch, about 20 times as slow, with the same results: {error}", stacklevel=3)
        return REFERENCE
    return cast(Arithmetic, native)
