"""Four-bit numbers: every code, every tie, and the neighbours of every tie."""

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_dmtd.quantization.e2m1 import MAGNITUDES, codebook, decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def test_every_code_decodes_to_its_value_and_encodes_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert decode_e2m1(codes).tolist() == values == codebook().tolist()
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)


@pytest.mark.parametrize(("tie", "value"), TIES.items())
@pytest.mark.parametrize("sign", [1, -1])
def test_a_tie_goes_to_the_even_code_and_its_neighbours_to_the_nearest(tie, value, sign):
    around = np.array(
        [np.nextafter(np.float32(tie), np.float32(0)), tie, np.nextafter(np.float32(tie), np.float32(9))], np.float32
    )
    lower = max(magnitude for magnitude in MAGNITUDES if magnitude < tie)
    upper = min(magnitude for magnitude in MAGNITUDES if magnitude > tie)
    assert (decode_e2m1(encode_e2m1(sign * torch.from_numpy(around))) * sign).tolist() == [lower, value, upper]


def test_what_is_too_large_becomes_six():
    assert decode_e2m1(encode_e2m1(torch.tensor([6.1, -7.0, 1e38]))).tolist() == [6, -6, 6]


def test_rounding_is_that_of_ml_dtypes():
    values = np.linspace(-8, 8, 320_001, dtype=np.float32)
    expected = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(decode_e2m1(encode_e2m1(torch.from_numpy(values))).numpy(), expected)


def test_element_0_is_in_the_low_nibble():
    assert pack_nibbles(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)
