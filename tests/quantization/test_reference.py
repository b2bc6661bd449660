"""The formats against arithmetic in plain Python, and other libraries. The kernels are compared in test_native.py."""

import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_dmtd.quantization import reference

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e8m0_scales_are_powers_of_two_down_to_the_smallest():
    byte = torch.arange(256, dtype=torch.uint8)
    decoded = reference.decode_e8m0(byte)
    assert decoded[:255].tolist() == [math.ldexp(1.0, k - 127) for k in range(255)] and decoded[255].isnan()
    assert np.array_equal(decoded[:255].numpy(), byte[:255].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@pytest.mark.parametrize(("quantize", "most"), [(reference.quantize_mxfp4, 6), (reference.quantize_mxfp8, 448)])
def test_rceil_is_the_smallest_power_that_cuts_nothing_and_floor_the_difference_of_exponents(quantize, most):
    largest = [most * 2.0**k * f for k in (-130, -128, -126, -20, 0, 1, 60, 110) for f in (0.5, 0.75, 1.0, 1.25, 1.5)]
    largest += [math.nextafter(most, 0), float(np.nextafter(np.float32(most), np.float32(1e9)))]
    x = torch.zeros(len(largest), 32)
    x[:, 5] = -torch.tensor(largest)
    smallest = [next(k for k in range(255) if most * 2.0 ** (k - 127) >= value) for value in x[:, 5].abs().tolist()]
    assert quantize(x, up=True)[1].flatten().tolist() == smallest
    floor = [max(0, math.frexp(value)[1] - math.frexp(most)[1] + 127) for value in x[:, 5].abs().tolist()]
    assert quantize(x, up=False)[1].flatten().tolist() == floor != smallest


def by_hand(block: list[float], *, bound: float, amax: float, target: float) -> tuple[int, list[float], float]:
    """Scale byte, values, and exact squared error of one block, with numpy's float32."""
    f = np.float32
    g = f(amax) / f(6 * bound)
    ratio = f(max(map(abs, block))) / f(6) / g * f(6 / target)
    scale = np.array(min(ratio, f(448))).astype(ml_dtypes.float8_e4m3fn)
    divisor = scale.astype(f) * g
    codes = np.array([f(value) / divisor for value in block], f).astype(ml_dtypes.float4_e2m1fn).astype(f)
    values = codes * scale.astype(f) * g
    return int(scale.view(np.uint8)), values.tolist(), float(((np.array(block) - values.astype(np.float64)) ** 2).sum())


@pytest.mark.parametrize(("bound", "four_over_six"), [(448, False), (256, True)])
def test_blocks_of_16_are_those_worked_out_by_hand(bound, four_over_six):
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 0, 200)[:, None]
    amax = x.abs().max().item()
    packed, scales = reference.quantize_nvfp4(x, torch.tensor(amax) / torch.tensor(6.0 * bound), four_over_six=four_over_six)
    decoded = reference.dequantize_nvfp4(packed, scales, torch.tensor(amax) / torch.tensor(6.0 * bound))
    chosen = []
    for block, scale, ours in zip(x.tolist(), scales.view(torch.uint8).flatten().tolist(), decoded.tolist(), strict=True):
        six, four = (by_hand(block, bound=bound, amax=amax, target=target) for target in (6, 4))
        best = four if four_over_six and four[2] < six[2] else six
        assert (scale, ours) == best[:2]
        chosen.append(best is four)
    assert any(chosen) == four_over_six and not all(chosen)


def test_a_tie_of_4over6_goes_to_six():
    x = torch.zeros(2, 16)
    x[:, 0] = torch.tensor([1536.0, 6.0])
    _, scales = reference.quantize_nvfp4(x, torch.tensor(1.0), four_over_six=True)
    assert scales.float().tolist() == [[256.0], [1.0]], "256 * 6 = 384 * 4, 1 * 6 = 1.5 * 4: both exact"


def test_a_block_whose_scale_rounds_to_zero_holds_zeros():
    x = torch.tensor([[448.0 * 6] + [0.0] * 15, [1e-3, -1e-3] + [0.0] * 14])
    packed, scales = reference.quantize_nvfp4(x, torch.tensor(1.0), four_over_six=False)
    assert scales.float().tolist() == [[448.0], [0.0]] and packed[1].tolist() == [0] * 8


def test_nothing_has_the_largest_magnitude_zero():
    assert reference.largest_magnitude(torch.empty(0, 16)).item() == 0


def test_mxfp8_values_are_those_of_ml_dtypes():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    values, scales = reference.quantize_mxfp8(x, up=True)
    powers = 2.0 ** (scales.numpy().astype(np.float32) - 127)
    expected = (x.numpy() / powers).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(values.view(torch.uint8).numpy(), expected.view(np.uint8))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Arguments of `quantization/others.py`, and what it answers in a process that sees those libraries."""
    given = {"x": torch.randn(256, 512, generator=torch.Generator().manual_seed(3))}
    given["global"] = given["x"].abs().max() / torch.tensor(2688.0)
    packed, scales = reference.quantize_nvfp4(given["x"], given["global"], four_over_six=False)
    given["values"] = reference.dequantize_nvfp4(
        packed, torch.ones_like(scales.float()).to(torch.float8_e4m3fn), torch.tensor(1.0)
    )
    folder = tmp_path_factory.mktemp("others")
    torch.save(given, folder / "given.pt")
    environment = os.environ | {"PYTHONPATH": str(Path(sys.prefix) / "oracles")}
    script = Path(__file__).with_name("others.py")
    subprocess.run([sys.executable, script, folder / "given.pt", folder / "answer.pt"], check=True, env=environment)
    return given, torch.load(folder / "answer.pt")


def test_torchao_makes_the_same_nvfp4(theirs):
    given, answer = theirs
    packed, scales = reference.quantize_nvfp4(given["x"], given["global"], four_over_six=False)
    assert answer["global"] == given["global"] and torch.equal(scales.view(torch.uint8), answer["nvfp4 scales"])
    assert torch.equal(packed, answer["nvfp4 codes"]), "these numbers hold no tie"


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize(("name", "quantize"), [("mxfp4", reference.quantize_mxfp4), ("mxfp8", reference.quantize_mxfp8)])
def test_torchao_makes_the_same_mx(theirs, rule, name, quantize):
    given, answer = theirs
    codes, scales = quantize(given["x"], up=rule == "rceil")
    assert torch.equal(scales, answer[f"{name} {rule} scales"])
    assert torch.equal(codes.view(torch.uint8), answer[f"{name} {rule} codes"])


def test_compressed_tensors_packs_the_same_bytes(theirs):
    given, answer = theirs
    packed, _ = reference.quantize_nvfp4(given["x"], given["global"], four_over_six=False)
    assert torch.equal(packed, answer["packed"])
