"""The formats, slow and obvious, in plain torch: what the native kernels are equal to, bit for bit. Runs on any device.

Every function has a twin of the same name in `native.py` (`Arithmetic` in `arithmetic.py`). Arguments have been checked: `x` is
finite, float32 or bfloat16, and its last axis is a multiple of the format's block.

Shapes: `x` is [..., K]; below, J are all blocks of a tensor and a number is the width of a block.
"""

from __future__ import annotations

import torch

from megatron_dmtd.quantization.e2m1 import LARGEST, decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles

#: largest finite value of e4m3
LARGEST_E4M3 = 448.0
E8M0_BIAS = 127


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """0-dim float32; NaN or infinity if `x` holds one, 0 if it holds nothing."""
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor, *, four_over_six: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., K/2] and e4m3 scales [..., K/16]. A block with a scale of zero holds zeros."""
    x_J16 = x.float().reshape(-1, 16)
    ratio_J = _quotient(_quotient(x_J16.abs().amax(dim=1), _like(LARGEST, x_J16)), global_scale)
    scale_J, codes_J16 = _with_scale(x_J16, ratio_J, global_scale)
    if four_over_six:
        scale4_J, codes4_J16 = _with_scale(x_J16, ratio_J * 1.5, global_scale)
        excess_J16 = _squared_errors(x_J16, codes4_J16, scale4_J, global_scale)
        excess_J16 -= _squared_errors(x_J16, codes_J16, scale_J, global_scale)
        four_J = _sum(excess_J16) < 0
        codes_J16 = torch.where(four_J[:, None], codes4_J16, codes_J16)
        # float8 has no `where`
        scale_J = torch.where(four_J, scale4_J.view(torch.uint8), scale_J.view(torch.uint8)).view(torch.float8_e4m3fn)
    return pack_nibbles(codes_J16).view(*x.shape[:-1], x.shape[-1] // 2), scale_J.view(*x.shape[:-1], x.shape[-1] // 16)


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Values [..., K], float32: code * scale, which is exact, times the global scale."""
    values_J16 = decode_e2m1(unpack_nibbles(packed)).reshape(-1, 16)
    return (values_J16 * scales.float().reshape(-1, 1) * global_scale).view(*packed.shape[:-1], 2 * packed.shape[-1])


def quantize_mxfp4(x: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., K/2] and E8M0 scales [..., K/32]; `up` is the rule `rceil`."""
    x_J32 = x.float().reshape(-1, 32)
    exponent_J = _exponents(x_J32, LARGEST, up=up)
    codes_J32 = encode_e2m1(torch.ldexp(x_J32, -exponent_J[:, None]))
    return (
        pack_nibbles(codes_J32).view(*x.shape[:-1], x.shape[-1] // 2),
        (exponent_J + E8M0_BIAS).to(torch.uint8).view(*x.shape[:-1], x.shape[-1] // 32),
    )


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [..., K], float32."""
    values_J32 = decode_e2m1(unpack_nibbles(packed)).reshape(-1, 32)
    return (values_J32 * decode_e8m0(scales).reshape(-1, 1)).view(*packed.shape[:-1], 2 * packed.shape[-1])


def quantize_mxfp8(x: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of e4m3 [..., K] and E8M0 scales [..., K/32]."""
    x_J32 = x.float().reshape(-1, 32)
    exponent_J = _exponents(x_J32, LARGEST_E4M3, up=up)
    values_J32 = torch.ldexp(x_J32, -exponent_J[:, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    scale_J = (exponent_J + E8M0_BIAS).to(torch.uint8)
    return values_J32.view(x.shape), scale_J.view(*x.shape[:-1], x.shape[-1] // 32)


def dequantize_mxfp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [..., K], float32."""
    return (values.float().reshape(-1, 32) * decode_e8m0(scales).reshape(-1, 1)).view(values.shape)


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127), float32; byte 255 is NaN. Torch's own cast loses 2^-127."""
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - E8M0_BIAS).float()
    powers[255] = torch.nan
    return powers.to(scales.device)[scales.long()]


def _exponents(x_J32: torch.Tensor, largest: float, *, up: bool) -> torch.Tensor:
    """Per block, the exponent of its scale, at least -127.

    Up: the smallest power of two by which the largest magnitude must be divided to fit below `largest`. Down: the difference of
    the exponents of the two, so that values may be cut. int32, exact.
    """
    amax_J, exponent_J = torch.frexp(x_J32.abs().amax(dim=1).double())
    (fraction,), (exponent,) = (tensor.tolist() for tensor in torch.frexp(torch.tensor([largest])))
    exponent_J = exponent_J - exponent + (amax_J > fraction if up else torch.zeros_like(amax_J)).to(torch.int32)
    return torch.where(amax_J == 0, -E8M0_BIAS, exponent_J.clamp(min=-E8M0_BIAS))


def _with_scale(x_J16: torch.Tensor, ratio_J: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale_J = ratio_J.clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn)
    divisor_J1 = (scale_J.float() * global_scale)[:, None]
    return scale_J, encode_e2m1(_quotient(x_J16, divisor_J1)) * (divisor_J1 > 0).to(torch.uint8)


def _squared_errors(
    x_J16: torch.Tensor, codes_J16: torch.Tensor, scale_J: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """Float64 squares, which are exact, of float32 differences."""
    value_J16 = decode_e2m1(codes_J16) * scale_J.float()[:, None] * global_scale
    return (x_J16 - value_J16).double() ** 2


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """The sum of each row, in the order of both twins: halves are added onto each other."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def _quotient(numerator: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The float32 quotient, 0 where the divisor is 0. A tensor divides: for a number, torch may multiply by its reciprocal."""
    divisor = divisor.expand_as(numerator)
    return torch.where(divisor > 0, numerator / divisor, 0.0)


def _like(value: float, tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, device=tensor.device)
