"""Low-precision formats: NVFP4, 4over6, MXFP4 and MXFP8; fake quantisation; records of a rollout's rounding.

`docs/low_precision.md` defines them. The functions work on tensors, `Format` makes values of them. It knows nothing about models.
"""

from megatron_dmtd.quantization.fake import fake_quantize
from megatron_dmtd.quantization.formats import FORMATS, FOUR_OVER_SIX, MXFP4, MXFP8, NVFP4, Format, Quantized, format_named
from megatron_dmtd.quantization.functions import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_4over6,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from megatron_dmtd.quantization.record import Record, guided_round

__all__ = [
    "FORMATS",
    "FOUR_OVER_SIX",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Format",
    "Quantized",
    "Record",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "fake_quantize",
    "format_named",
    "guided_round",
    "quantize_4over6",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
]
