"""The native kernels give the bytes of the slow twin, bit for bit, on CPUs with AVX2 and with AVX-512."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dmtd.infra.native import EXACT_FLAGS, NATIVE
from megatron_dmtd.quantization import native, reference

X86 = platform.machine() in ("x86_64", "AMD64")
LEVELS = ["-march=native", *(["-march=x86-64-v3", "-mprefer-vector-width=256"] if X86 else [])]
SCALES = [1.0, 1e-38, 1e-42, 1e37, 0.0]


@pytest.fixture(params=LEVELS, autouse=True)
def level(request, monkeypatch):
    """Every test runs on kernels compiled for this CPU, and for less."""
    extra = (request.param,) if "march" in request.param else (NATIVE, request.param)
    kernels = native.load_kernels((*EXACT_FLAGS, *extra))
    monkeypatch.setattr(native, "load_kernels", lambda: kernels)


def equal(ours, theirs) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def values(scale: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Four orders of magnitude, many ties, and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 128, generator=generator) * torch.exp(torch.randn(96, 128, generator=generator)).clamp(max=20)
    x[:32] = torch.randint(-48, 49, (32, 128), generator=generator) / 8
    x[40, :32], x[41, :16] = 0, -0.0
    return (x * scale).to(dtype)


def check(x: torch.Tensor) -> None:
    largest = reference.largest_magnitude(x)
    assert torch.equal(native.largest_magnitude(x), largest)
    for bound, four_over_six in ((448, False), (256, True)):
        scale = largest / torch.tensor(6.0 * bound)
        ours = native.quantize_nvfp4(x, scale, four_over_six=four_over_six)
        assert equal(ours, reference.quantize_nvfp4(x, scale, four_over_six=four_over_six))
        assert equal([native.dequantize_nvfp4(*ours, scale)], [reference.dequantize_nvfp4(*ours, scale)])
    for up in (True, False):
        ours = native.quantize_mxfp4(x, up=up)
        assert equal(ours, reference.quantize_mxfp4(x, up=up))
        assert equal([native.dequantize_mxfp4(*ours)], [reference.dequantize_mxfp4(*ours)])
        ours = native.quantize_mxfp8(x, up=up)
        assert equal(ours, reference.quantize_mxfp8(x, up=up))
        assert equal([native.dequantize_mxfp8(*ours)], [reference.dequantize_mxfp8(*ours)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
def test_bytes_are_those_of_the_slow_twin(dtype, scale):
    check(values(scale, dtype))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bytes_are_those_of_the_slow_twin_for_any_floats(numbers, as_bf16):
    x = torch.tensor(numbers).clamp(-3e38, 3e38)
    check(x.bfloat16() if as_bf16 else x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_magnitude_shows_what_is_not_finite(bad, dtype):
    x = values(1.0, dtype)
    x[50, 7] = bad
    assert not torch.isfinite(native.largest_magnitude(x)) and not torch.isfinite(reference.largest_magnitude(x))


def test_every_byte_and_scale_decodes_as_in_the_slow_twin():
    byte = torch.arange(256, dtype=torch.uint8)
    packed, scales = byte.repeat_interleave(8).view(256, 8), byte.view(256, 1)
    for scale in scales.unbind():
        scale_J = scale.expand(256, 1).contiguous()
        e4m3 = scale_J.view(torch.float8_e4m3fn)
        ours, theirs = (twin.dequantize_nvfp4(packed, e4m3, torch.tensor(0.3)) for twin in (native, reference))
        assert torch.equal(ours.nan_to_num(7e30), theirs.nan_to_num(7e30))
        wide = packed.repeat(1, 2)
        ours, theirs = (twin.dequantize_mxfp4(wide, scale_J) for twin in (native, reference))
        assert torch.equal(ours.nan_to_num(7e30), theirs.nan_to_num(7e30))
        wide = packed.repeat(1, 4).view(torch.float8_e4m3fn)
        ours, theirs = (twin.dequantize_mxfp8(wide, scale_J) for twin in (native, reference))
        assert torch.equal(ours.nan_to_num(7e30), theirs.nan_to_num(7e30))
