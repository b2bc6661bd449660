"""What a rollout keeps of a tensor that it quantised (`Record`), and how a trainer rounds its own values by it (`guided_round`).

Both sides of reinforcement learning compute the same activations with slightly different arithmetic; near a rounding boundary the
two land on neighbouring values of the four-bit codebook. A record holds the rollout's scales and the low bits of its codes. The
trainer scales its values by the *rollout's* scales, and of the two codebook values around each chooses the one nearer to the
rollout's (TRACE, arXiv:2610.07767). With all four bits the rollout's value is known; fewer bits name the nearest magnitude whose
code has these low bits.

The result is never further from the rollout's value than nearest rounding would be, with four bits. With one bit this holds where
the rollout's value is one of the two around the trainer's; elsewhere a parity can point away from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.quantization.e2m1 import MAGNITUDES, SIGN, unpack_nibbles
from megatron_dmtd.quantization.functions import INPUT_TYPES, NVFP4_BLOCK, check_nvfp4

FULL_CODE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Low bits of the codes of a tensor in NVFP4 or 4over6, with its scales. Shapes: rows [...] of K values."""

    bits: int
    """Bits of each code, 1 to 4; 4 is the full code."""
    codes: torch.Tensor
    """uint8 [..., K * bits / 8]: element i in bits `i * bits` and up of its row, from the lowest bit of the first byte."""
    scales: torch.Tensor
    """float8_e4m3fn [..., K / 16]."""
    global_scale: torch.Tensor
    """float32, 0-dim."""

    @classmethod
    def from_quantized(cls, packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, bits: int) -> Record:
        """A record of what `quantize_nvfp4` or `quantize_4over6` gave.

        Raises:
            ConfigError: `bits` is not 1, 2, 3 or 4.
            DataError: Types or shapes that these functions do not give.
        """
        if bits not in range(1, FULL_CODE + 1):
            raise ConfigError(
                found=f"a record of {bits} bits", required="1 to 4; 4 is the full code", remedy="keep 1 bit, the default of TRACE"
            )
        check_nvfp4(packed, scales, global_scale)
        codes = packed if bits == FULL_CODE else _pack_bits(unpack_nibbles(packed), bits)
        return cls(bits, codes, scales, global_scale)

    @property
    def shape(self) -> torch.Size:
        """Shape of the recorded tensor."""
        return torch.Size((*self.scales.shape[:-1], NVFP4_BLOCK * self.scales.shape[-1]))

    @property
    def nbytes(self) -> int:
        """Rows * (K * bits / 8 + K / 16) + 4."""
        return self.codes.numel() + self.scales.numel() + 4

    def low_bits(self) -> torch.Tensor:
        """The low bits of each code, uint8 [..., K]."""
        if self.bits == FULL_CODE:
            return unpack_nibbles(self.codes)
        places = torch.arange(8, dtype=torch.uint8, device=self.codes.device)
        single = ((self.codes[..., None] >> places) & 1).reshape(*self.shape, self.bits)
        return (single << places[: self.bits]).sum(dim=-1, dtype=torch.uint8)


def _pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    single = (codes[..., None] >> places[:bits]) & 1
    # A row is a multiple of 16 elements, so it ends with a whole byte.
    eights = single.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8, 8)
    return (eights << places).sum(dim=-1, dtype=torch.uint8)


def guided_round(x_train: torch.Tensor, record: Record) -> torch.Tensor:
    """`x_train` on the rollout's grid: of the two values around each element, the one nearer to what the rollout had.

    The grid are the values that `dequantize_nvfp4` gives with the record's scales, so an element that is one of them stays as it
    is. Above the largest it is cut; where the scale is zero the result is 0. NaN and infinity stay, so that a trainer's own
    checks see them.

    Args:
        x_train: float32 or bfloat16, of the record's shape.
        record: Record of the same token and site.

    Returns:
        Shape and type of `x_train`; its gradient is exactly the upstream one.

    Raises:
        DataError: Another shape or type.
    """
    if x_train.dtype not in INPUT_TYPES:
        raise DataError(
            found=f"a tensor of {x_train.dtype}", required="float32 or bfloat16", remedy="convert it first, with .float()"
        )
    if x_train.shape != record.shape:
        raise DataError(
            found=f"values of shape {tuple(x_train.shape)} with a record of {tuple(record.shape)}",
            required="the shape that the rollout recorded",
            remedy="pair values and records of the same tokens and site, each of the same width",
        )
    return _GuidedRound.apply(x_train, record)


class _GuidedRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_train: torch.Tensor, record: Record) -> torch.Tensor:
        rounded = _round(x_train.float().reshape(-1, NVFP4_BLOCK), record).view(x_train.shape)
        return torch.where(x_train.isfinite(), rounded.to(x_train.dtype), x_train)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _round(x_J16: torch.Tensor, record: Record) -> torch.Tensor:
    """J are all blocks, 8 the magnitudes of the codebook."""
    scale_J1 = record.scales.float().reshape(-1, 1)
    # The grid as the dequantiser computes it, and exactly. A difference of one rounding decides between neighbours.
    magnitudes_8 = torch.tensor(MAGNITUDES, device=x_J16.device)
    grid_J8 = magnitudes_8 * scale_J1 * record.global_scale
    exact_J8 = magnitudes_8.double() * (scale_J1.double() * record.global_scale.double())
    magnitude_J16 = x_J16.abs()
    low_J16 = sum((magnitude_J16 >= grid_J8[:, index : index + 1]).long() for index in range(1, len(MAGNITUDES)))
    assert isinstance(low_J16, torch.Tensor)
    on_grid = magnitude_J16 == grid_J8.gather(1, low_J16)
    high_J16 = torch.where(on_grid, low_J16, (low_J16 + 1).clamp(max=len(MAGNITUDES) - 1))
    code_J16 = record.low_bits().reshape(-1, NVFP4_BLOCK)
    if record.bits == FULL_CODE:
        # Of the opposite sign every value is nearer to the lower end than to the upper.
        opposite = (code_J16 >= SIGN) != torch.signbit(x_J16)
        reference_J16 = torch.where(opposite, 0, (code_J16 & (SIGN - 1)).long())
    else:
        reference_J16 = _nearest_of_class(magnitude_J16.double(), exact_J8, code_J16.long(), record.bits)
    # No codebook value lies between the two candidates: one at the upper end or beyond it is nearer to that end.
    chosen_J16 = torch.where(reference_J16 >= high_J16, high_J16, low_J16)
    value_J16 = torch.copysign(grid_J8.gather(1, chosen_J16), x_J16)
    divisor_J1 = scale_J1 * record.global_scale
    return torch.where(divisor_J1 > 0, value_J16, 0.0)


def _nearest_of_class(magnitude_J16: torch.Tensor, exact_J8: torch.Tensor, low_bits_J16: torch.Tensor, bits: int) -> torch.Tensor:
    """Index of the magnitude nearest to each among those whose code has the given low bits; the smaller if tied. Exact."""
    step = 1 << bits
    index_J16 = low_bits_J16 & (step - 1) & (SIGN - 1)
    for _ in range(len(MAGNITUDES) // step - 1):
        following = (index_J16 + step).clamp(max=len(MAGNITUDES) - 1)
        twice_middle = exact_J8.gather(1, index_J16) + exact_J8.gather(1, following)
        index_J16 = torch.where((2 * magnitude_J16 > twice_middle) & (following == index_J16 + step), following, index_J16)
    return index_J16
