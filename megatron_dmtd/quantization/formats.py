"""The formats as values: a `Format` makes a `Quantized` tensor of any tensor, and knows how many bytes that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.quantization import functions
from megatron_dmtd.quantization.functions import MX_BLOCK, NVFP4_BLOCK, SCALE_RULES

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A low-precision format with one scale per block along the last axis."""

    name: str
    bits: int
    """Bits of one element."""
    block: int
    """Elements below one scale of 8 bits."""
    has_global_scale: bool
    """Whether a float32 scale of the whole tensor stands above those of the blocks."""
    _quantize: Callable[[torch.Tensor], Parts]
    _dequantize: Callable[..., torch.Tensor]

    def quantize(self, x: torch.Tensor) -> Quantized:
        """The tensor in this format; `x` and the errors are those of `functions.py`."""
        packed, scales, *rest = self._quantize(x)
        return Quantized(format=self, packed=packed, scales=scales, global_scale=rest[0] if rest else None)

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Float32, of the shape that was quantised."""
        parts = [quantized.packed, quantized.scales]
        return self._dequantize(*parts, *([] if quantized.global_scale is None else [quantized.global_scale]))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """What a tensor of `shape` takes, scales included."""
        elements = torch.Size(shape).numel()
        return elements * self.bits // 8 + elements // self.block + 4 * self.has_global_scale

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """A tensor in a low-precision format."""

    format: Format
    packed: torch.Tensor
    """Four-bit codes, two to a byte, or values of e4m3."""
    scales: torch.Tensor
    """One per block."""
    global_scale: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        parts = (self.packed, self.scales, self.global_scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def dequantize(self) -> torch.Tensor:
        """Float32, of the shape that was quantised."""
        return self.format.dequantize(self)


def _mx(name: str, bits: int, rule: str) -> Format:
    quantize = functions.quantize_mxfp4 if bits == 4 else functions.quantize_mxfp8
    dequantize = functions.dequantize_mxfp4 if bits == 4 else functions.dequantize_mxfp8
    suffix = "" if rule == "rceil" else f"-{rule}"
    return Format(name + suffix, bits, MX_BLOCK, False, lambda x: quantize(x, scale_rule=rule), dequantize)


NVFP4 = Format("nvfp4", 4, NVFP4_BLOCK, True, functions.quantize_nvfp4, functions.dequantize_nvfp4)
FOUR_OVER_SIX = Format("4over6", 4, NVFP4_BLOCK, True, functions.quantize_4over6, functions.dequantize_nvfp4)
MXFP4, MXFP4_FLOOR = (_mx("mxfp4", 4, rule) for rule in SCALE_RULES)
MXFP8, MXFP8_FLOOR = (_mx("mxfp8", 8, rule) for rule in SCALE_RULES)

FORMATS = {format.name: format for format in (NVFP4, FOUR_OVER_SIX, MXFP4, MXFP4_FLOOR, MXFP8, MXFP8_FLOOR)}


def format_named(name: str) -> Format:
    """The format of a name.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in FORMATS:
        raise ConfigError(found=f"format {name!r}", required=f"one of {', '.join(FORMATS)}", remedy="name one of them")
    return FORMATS[name]
