"""The formats as functions on tensors: `quantize_*` and `dequantize_*`. They check their arguments; `arithmetic.py` computes.

Shapes: K is the width of a row, the last axis, along which blocks lie. Nothing here has a gradient (`fake.py` has).
"""

from __future__ import annotations

import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.quantization.arithmetic import arithmetic_for
from megatron_dmtd.quantization.e2m1 import LARGEST
from megatron_dmtd.quantization.reference import LARGEST_E4M3

NVFP4_BLOCK = 16
MX_BLOCK = 32
#: largest block scale of 4over6, which leaves room for scales 1.5 times as large
FOUR_OVER_SIX_BOUND = 256.0
SCALE_RULES = ("rceil", "floor")
INPUT_TYPES = (torch.float32, torch.bfloat16)


@torch.no_grad()
def quantize_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E2M1 codes in blocks of 16 with e4m3 scales, below one float32 scale.

    Args:
        x: [..., K], float32 or bfloat16, K a multiple of 16.

    Returns:
        Packed codes, uint8 [..., K/2]; scales, float8_e4m3fn [..., K/16]; global scale, 0-dim float32, amax / (448 * 6).

    Raises:
        DataError: Another width or type, NaN, or infinity.
    """
    return _quantize_nvfp4(x, bound=LARGEST_E4M3, four_over_six=False)


@torch.no_grad()
def quantize_4over6(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4 that maps the largest magnitude of each block to 6 or to 4, by squared error (arXiv:2512.02010).

    Arguments, results and errors are those of `quantize_nvfp4`, and `dequantize_nvfp4` decodes it; the global scale is amax /
    (256 * 6). A tie goes to 6.
    """
    return _quantize_nvfp4(x, bound=FOUR_OVER_SIX_BOUND, four_over_six=True)


def _quantize_nvfp4(x: torch.Tensor, *, bound: float, four_over_six: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_input(x, NVFP4_BLOCK)
    arithmetic = arithmetic_for(x)
    amax = _finite(arithmetic.largest_magnitude(x))
    global_scale = amax / torch.full_like(amax, bound * LARGEST)
    return *arithmetic.quantize_nvfp4(x, global_scale, four_over_six=four_over_six), global_scale


@torch.no_grad()
def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Float32 [..., K], code * scale * global_scale.

    Raises:
        DataError: Types or shapes that `quantize_nvfp4` does not give.
    """
    check_nvfp4(packed, scales, global_scale)
    return arithmetic_for(packed).dequantize_nvfp4(packed, scales, global_scale)


def check_nvfp4(packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Raises `DataError` unless types and shapes are those that `quantize_nvfp4` gives."""
    _check_type("codes", packed, torch.uint8)
    _check_type("scales", scales, torch.float8_e4m3fn)
    _check_type("global scale", global_scale, torch.float32)
    if global_scale.dim():
        raise DataError(
            found=f"a global scale of shape {tuple(global_scale.shape)}",
            required="one number, 0-dim",
            remedy="pass it as it was quantised",
        )
    _check_scales(packed, scales, width=2 * (packed.shape[-1] if packed.dim() else 0), block=NVFP4_BLOCK)


@torch.no_grad()
def quantize_mxfp4(x: torch.Tensor, scale_rule: str = "rceil") -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes in blocks of 32 below a power of two.

    Args:
        x: [..., K], float32 or bfloat16, K a multiple of 32.
        scale_rule: `rceil`: the smallest power of two at which nothing of the block is cut. `floor`: that of the Open Compute
            Project, by which magnitudes above 6 become 6.

    Returns:
        Packed codes, uint8 [..., K/2]; exponents plus 127, uint8 [..., K/32] (E8M0).

    Raises:
        ConfigError: An unknown rule.
        DataError: Another width or type, NaN, or infinity.
    """
    up = _rounds_up(scale_rule)
    _check_input(x, MX_BLOCK)
    _finite(arithmetic_for(x).largest_magnitude(x))
    return arithmetic_for(x).quantize_mxfp4(x, up=up)


@torch.no_grad()
def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 [..., K]; NaN in a block with the scale 255.

    Raises:
        DataError: Types or shapes that `quantize_mxfp4` does not give.
    """
    _check_type("codes", packed, torch.uint8)
    _check_type("scales", scales, torch.uint8)
    _check_scales(packed, scales, width=2 * (packed.shape[-1] if packed.dim() else 0), block=MX_BLOCK)
    return arithmetic_for(packed).dequantize_mxfp4(packed, scales)


@torch.no_grad()
def quantize_mxfp8(x: torch.Tensor, scale_rule: str = "rceil") -> tuple[torch.Tensor, torch.Tensor]:
    """Values of e4m3 in blocks of 32 below a power of two: float8_e4m3fn [..., K], and scales as those of `quantize_mxfp4`.

    Arguments and errors are those of `quantize_mxfp4`; what is cut becomes 448.
    """
    up = _rounds_up(scale_rule)
    _check_input(x, MX_BLOCK)
    _finite(arithmetic_for(x).largest_magnitude(x))
    return arithmetic_for(x).quantize_mxfp8(x, up=up)


@torch.no_grad()
def dequantize_mxfp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 [..., K]; NaN in a block with the scale 255.

    Raises:
        DataError: Types or shapes that `quantize_mxfp8` does not give.
    """
    _check_type("values", values, torch.float8_e4m3fn)
    _check_type("scales", scales, torch.uint8)
    _check_scales(values, scales, width=values.shape[-1] if values.dim() else 0, block=MX_BLOCK)
    return arithmetic_for(values).dequantize_mxfp8(values, scales)


def _rounds_up(scale_rule: str) -> bool:
    if scale_rule not in SCALE_RULES:
        raise ConfigError(
            found=f"scale_rule {scale_rule!r}", required=f"one of {', '.join(SCALE_RULES)}", remedy="name one of them"
        )
    return scale_rule == "rceil"


def _check_input(x: torch.Tensor, block: int) -> None:
    if x.dtype not in INPUT_TYPES:
        raise DataError(found=f"a tensor of {x.dtype}", required="float32 or bfloat16", remedy="convert it first, with .float()")
    if not x.dim() or x.shape[-1] % block:
        raise DataError(
            found=f"a tensor of shape {tuple(x.shape)}",
            required=f"a last axis whose length is a multiple of {block}, the block of the format",
            remedy="pad the last axis with zeros, or choose a format with smaller blocks",
        )


def _finite(amax: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(amax):
        raise DataError(
            found="NaN or infinity in a tensor to quantise",
            required="finite values",
            remedy="find the operation that made them; a four-bit format would hide them",
        )
    return amax


def _check_type(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise DataError(found=f"{what} of {tensor.dtype}", required=str(dtype), remedy="pass what was quantised in this format")


def _check_scales(codes: torch.Tensor, scales: torch.Tensor, *, width: int, block: int) -> None:
    wanted = (*codes.shape[:-1], width // block)
    if not codes.dim() or width % block or scales.shape != wanted:
        raise DataError(
            found=f"codes of shape {tuple(codes.shape)}, rows of {width} values, with scales of shape {tuple(scales.shape)}",
            required=f"rows of whole blocks of {block} values, and one scale for each: {wanted}",
            remedy="pass codes and scales of the same tensor, in their format",
        )
