"""The formats in C, on one core: `kernels.c`, compiled once for this machine. Twin of `reference.py`, function by function."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dmtd.infra.native import EXACT_FLAGS, NATIVE, load_library
from megatron_dmtd.quantization.e2m1 import decode_e2m1, unpack_nibbles
from megatron_dmtd.quantization.reference import decode_e8m0

SOURCE = Path(__file__).parent / "kernels.c"
REMEDY = "install gcc, or use megatron_dmtd.quantization.reference, which gives the same bytes more slowly"

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "dmtd_largest_bits": [POINTER, LONG, INT],
    "dmtd_quantize_nvfp4": [POINTER, LONG, FLOAT, INT, INT, POINTER, POINTER],
    "dmtd_quantize_mxfp4": [POINTER, LONG, INT, INT, POINTER, POINTER],
    "dmtd_quantize_mxfp8": [POINTER, LONG, INT, INT, POINTER, POINTER],
    "dmtd_dequantize_nvfp4": [POINTER, POINTER, FLOAT, LONG, POINTER, POINTER, POINTER],
    "dmtd_dequantize_mxfp4": [POINTER, POINTER, LONG, POINTER, POINTER, POINTER],
    "dmtd_dequantize_mxfp8": [POINTER, POINTER, LONG, POINTER, POINTER, POINTER],
}


@functools.cache
def load_kernels(flags: Sequence[str] = (*EXACT_FLAGS, NATIVE)) -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        CapabilityError: There is no C compiler, or it cannot compile them.
    """
    kernels = load_library([SOURCE], remedy=REMEDY, flags=flags)
    for name, types in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = types, ctypes.c_uint32 if name == "dmtd_largest_bits" else None
    return kernels


@functools.cache
def _tables() -> dict[str, torch.Tensor]:
    """Values of all codes, float32; of four-bit codes the two of each byte."""
    byte = torch.arange(256, dtype=torch.uint8)
    return {
        "pairs": decode_e2m1(unpack_nibbles(byte[:, None])).contiguous(),
        "e4m3": byte.view(torch.float8_e4m3fn).float(),
        "e8m0": decode_e8m0(byte),
    }


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """0-dim float32; NaN or infinity if `x` holds one, 0 if it holds nothing."""
    x = x.contiguous()
    bits = load_kernels().dmtd_largest_bits(x.data_ptr(), x.numel(), _is_bf16(x))
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor, *, four_over_six: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., K/2] and e4m3 scales [..., K/16]."""
    x = x.contiguous()
    packed, scales = _bytes(x, 2), _bytes(x, 16)
    load_kernels().dmtd_quantize_nvfp4(
        x.data_ptr(),
        x.numel() // 16,
        global_scale.item(),
        _is_bf16(x),
        int(four_over_six),
        packed.data_ptr(),
        scales.data_ptr(),
    )
    return packed, scales.view(torch.float8_e4m3fn)


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Values [..., K], float32."""
    packed, scales, tables = packed.contiguous(), scales.contiguous(), _tables()
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1])
    load_kernels().dmtd_dequantize_nvfp4(
        packed.data_ptr(),
        scales.data_ptr(),
        global_scale.item(),
        scales.numel(),
        tables["pairs"].data_ptr(),
        tables["e4m3"].data_ptr(),
        out.data_ptr(),
    )
    return out


def quantize_mxfp4(x: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., K/2] and E8M0 scales [..., K/32]."""
    x = x.contiguous()
    packed, scales = _bytes(x, 2), _bytes(x, 32)
    load_kernels().dmtd_quantize_mxfp4(x.data_ptr(), x.numel() // 32, _is_bf16(x), int(up), packed.data_ptr(), scales.data_ptr())
    return packed, scales


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [..., K], float32."""
    return _dequantize_mx("dmtd_dequantize_mxfp4", "pairs", packed, scales, width=2 * packed.shape[-1])


def quantize_mxfp8(x: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of e4m3 [..., K] and E8M0 scales [..., K/32]."""
    x = x.contiguous()
    values, scales = _bytes(x, 1), _bytes(x, 32)
    load_kernels().dmtd_quantize_mxfp8(x.data_ptr(), x.numel() // 32, _is_bf16(x), int(up), values.data_ptr(), scales.data_ptr())
    return values.view(torch.float8_e4m3fn), scales


def dequantize_mxfp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [..., K], float32."""
    return _dequantize_mx("dmtd_dequantize_mxfp8", "e4m3", values, scales, width=values.shape[-1])


def _dequantize_mx(kernel: str, table: str, codes: torch.Tensor, scales: torch.Tensor, *, width: int) -> torch.Tensor:
    codes, scales, tables = codes.contiguous(), scales.contiguous(), _tables()
    out = torch.empty(*codes.shape[:-1], width)
    getattr(load_kernels(), kernel)(
        codes.data_ptr(),
        scales.data_ptr(),
        scales.numel(),
        tables[table].data_ptr(),
        tables["e8m0"].data_ptr(),
        out.data_ptr(),
    )
    return out


def _bytes(x: torch.Tensor, per: int) -> torch.Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] // per, dtype=torch.uint8)
