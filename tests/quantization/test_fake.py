"""Fake quantisation: values of the format, gradients of none."""

import pytest
import torch

from megatron_dmtd.quantization import FORMATS, fake_quantize


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rounded_and_the_gradient_is_exactly_the_upstream_one(format, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(4, 64, generator=generator).to(dtype)
    y = fake_quantize(x, format)
    assert y.dtype == dtype and torch.equal(y, format.quantize(x).dequantize().to(dtype)) and not torch.equal(y, x)
    y.backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_cut_values_have_a_gradient_too():
    x = torch.full((32,), 7.0, requires_grad=True)
    fake_quantize(x, FORMATS["mxfp4-floor"]).sum().backward()
    assert torch.equal(x.grad, torch.ones(32))
