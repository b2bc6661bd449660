"""Formats as values: names, bytes, and the functions behind them."""

import pytest
import torch

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.quantization import FORMATS, quantize_4over6, quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from megatron_dmtd.quantization.formats import format_named

FUNCTIONS = {
    "nvfp4": quantize_nvfp4,
    "4over6": quantize_4over6,
    "mxfp4": quantize_mxfp4,
    "mxfp4-floor": lambda x: quantize_mxfp4(x, "floor"),
    "mxfp8": quantize_mxfp8,
    "mxfp8-floor": lambda x: quantize_mxfp8(x, "floor"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_format_is_its_function(name):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 7
    quantized, parts = format_named(name).quantize(x), FUNCTIONS[name](x)
    assert torch.equal(quantized.packed.view(torch.uint8), parts[0].view(torch.uint8))
    assert torch.equal(quantized.scales.view(torch.uint8), parts[1].view(torch.uint8))
    assert (quantized.global_scale is not None) == (len(parts) == 3)
    assert quantized.dequantize().shape == x.shape and str(quantized.format) == name


def test_bytes_are_those_of_the_tensors_and_of_the_formula():
    sizes = {"nvfp4": 112, "4over6": 112, "mxfp4": 102, "mxfp4-floor": 102, "mxfp8": 198, "mxfp8-floor": 198}
    for name, format in FORMATS.items():
        expected = sizes[name]
        assert format.quantize(torch.ones(3, 64)).nbytes == format.num_bytes((3, 64)) == expected


def test_rules_make_different_formats():
    x = torch.full((32,), 7.0)
    assert FORMATS["mxfp4"].quantize(x).dequantize()[0] == 8 and FORMATS["mxfp4-floor"].quantize(x).dequantize()[0] == 6


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="nvfp4, 4over6"):
        format_named("nvfp3")
