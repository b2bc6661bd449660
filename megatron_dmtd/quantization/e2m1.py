"""Four-bit numbers: E2M1, a sign, two bits of exponent, one of mantissa. Two stand in a byte, the first in its low half.

The code of a magnitude is its place in `MAGNITUDES`; 8 is added for a negative number. Rounding is to the nearest magnitude, and
a tie goes to the even code. What is above 6 becomes 6.
"""

from __future__ import annotations

import itertools

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8
LARGEST = MAGNITUDES[-1]


def codebook(device: torch.device | None = None) -> torch.Tensor:
    """Values of the 16 codes, float32."""
    return torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=device)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of finite float32 values: uint8, the same shape. Slow and obvious: counts the thresholds below a magnitude."""
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for index, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = (low + high) / 2
        # From an odd code a tie goes up, to the even one.
        code += (magnitude >= middle if index % 2 else magnitude > middle).to(torch.uint8)
    return code + SIGN * torch.signbit(values).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values of codes, float32."""
    return codebook(codes.device)[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, along the last axis, whose length is even."""
    assert codes.shape[-1] % 2 == 0, codes.shape
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
