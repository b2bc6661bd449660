"""The public functions: frozen bytes, shapes, what stays zero, and what is refused."""

import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError, DMTDError
from megatron_dmtd.quantization import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_4over6,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)

X = torch.stack((torch.arange(-8, 8) * 0.75, torch.arange(16) * 0.01))
WIDE = torch.cat([X, -X.flip(0)], 1) * 1.2
RCEIL = ["decdbc9a10324455888888888888888800000000000000005645341298baccdd", "8080"]
FLOOR = ["ffefdeac205466778888888888888888000000000000000077675624a8dceeff", "7f7f"]
EIGHT = [
    "f6f5f3f1eeebe6de005e666b6e71737580acb4b9bcbfc1c3c4c6c7c8c9cacbcc002c34393c3f414344464748494a4b4c767573716e6b665e80dee6ebeef1f3f5",
    "7a7a",
]
PAIRS = [
    (quantize_nvfp4, dequantize_nvfp4, 16),
    (quantize_4over6, dequantize_nvfp4, 16),
    (quantize_mxfp4, dequantize_mxfp4, 32),
    (quantize_mxfp8, dequantize_mxfp8, 32),
]


def hexadecimal(tensor: torch.Tensor) -> str:
    return bytes(tensor.reshape(-1).contiguous().view(torch.uint8).flatten().tolist()).hex()


def test_frozen_bytes():
    packed, scales, global_scale = quantize_nvfp4(X)
    assert (hexadecimal(packed), hexadecimal(scales)) == ("ffeecdab204365761022435465667677", "7e53")
    assert global_scale.item() == float.fromhex("0x1.24924a0000000p-9") and global_scale.dim() == 0
    packed, scales, global_scale = quantize_4over6(X)
    assert (hexadecimal(packed), hexadecimal(scales)) == ("ffeecdab204365761021324344555566", "7852")
    assert global_scale.item() == 6 / (256 * 6)
    assert [hexadecimal(part) for part in quantize_mxfp4(WIDE)] == RCEIL
    assert [hexadecimal(part) for part in quantize_mxfp4(WIDE, scale_rule="floor")] == FLOOR
    assert [hexadecimal(part) for part in quantize_mxfp8(WIDE, "rceil")] == EIGHT


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_any_number_of_axes_keeps_its_shape(quantize, dequantize, block, dtype, lead):
    x = torch.randn(*lead, 2 * block, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales, *_ = parts = quantize(x)
    assert scales.shape == (*lead, 2) and codes.shape[:-1] == lead
    decoded = dequantize(*parts)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    assert torch.allclose(decoded, x.float(), atol=1.0)


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_with_gaps_in_memory_gives_the_bytes_of_a_contiguous_one(quantize, dequantize, block, dtype):
    whole = torch.randn(4 * block, 3 * block, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view in (whole.T, whole[::2, block : 2 * block], whole[:, ::3]):
        assert not view.is_contiguous()
        ours, expected = quantize(view), quantize(view.contiguous())
        assert [hexadecimal(part) for part in ours] == [hexadecimal(part) for part in expected]
        strided = [torch.stack((p, p), -1)[..., 0] if p.dim() else p for p in ours]
        assert torch.equal(dequantize(*strided), dequantize(*ours))


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
def test_zeros_stay_zero(quantize, dequantize, block):
    x = torch.zeros(3, block)
    assert torch.equal(dequantize(*quantize(x)), x)
    x[1, 3] = 5.0
    decoded = dequantize(*quantize(x))
    assert decoded[1, 3] == pytest.approx(5.0, rel=0.2) and torch.count_nonzero(decoded) == 1


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
def test_what_a_format_can_hold_is_kept(quantize, dequantize, block):
    """Powers of two times codes. The global scale is a power of two as well: the largest of all is 6 * 448, or 6 * 256."""
    x = torch.tensor([0.0, 0.5, -1, 1.5, 2, -3, 4, 6]).repeat(2, block // 8)
    x[1] *= 256 if quantize is quantize_4over6 else 448 if quantize is quantize_nvfp4 else 64
    assert torch.equal(dequantize(*quantize(x)), x)


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.float16, torch.complex64])
def test_other_types_are_refused(quantize, dequantize, block, dtype):
    with pytest.raises(DataError, match="float32 or bfloat16"):
        quantize(torch.zeros(2, block).to(dtype))


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_refused(quantize, dequantize, block, bad, dtype):
    x = torch.ones(2, block, dtype=dtype)
    x[1, 5] = bad
    with pytest.raises(DataError, match="NaN or infinity"):
        quantize(x)


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
@pytest.mark.parametrize("shape", [(), (2, 8), (17,), (4, 33)])
def test_a_width_of_no_whole_blocks_is_refused(quantize, dequantize, block, shape):
    with pytest.raises(DataError, match=f"multiple of {block}"):
        quantize(torch.zeros(shape))


@pytest.mark.parametrize("quantize", [quantize_mxfp4, quantize_mxfp8])
def test_an_unknown_rule_is_refused(quantize):
    with pytest.raises(ConfigError, match="rceil, floor"):
        quantize(torch.zeros(32), scale_rule="even")


@pytest.mark.parametrize(("quantize", "dequantize", "block"), PAIRS)
def test_codes_and_scales_of_different_tensors_are_refused(quantize, dequantize, block):
    codes, scales, *rest = quantize(torch.ones(2, 2 * block))
    for wrong in (
        (codes[:, :-1], scales),
        (codes, scales[:, :1]),
        (codes[:1], scales),
        (codes.float(), scales),
        (codes, scales.float()),
    ):
        with pytest.raises(DMTDError):
            dequantize(*wrong, *rest)
    if rest:
        with pytest.raises(DataError, match="0-dim"):
            dequantize(codes, scales, rest[0][None])
        with pytest.raises(DataError, match="float64"):
            dequantize(codes, scales, rest[0].double())


def test_nothing_has_a_gradient():
    x = torch.ones(16, requires_grad=True)
    assert not dequantize_nvfp4(*quantize_nvfp4(x)).requires_grad
