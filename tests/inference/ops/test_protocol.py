import math

import torch

from megatron_dmtd.architecture import RotaryProfile
from megatron_dmtd.inference.ops.protocol import rotary_of
from tests.inference.oracle_models import YARN, decoder_of, yarn
from tests.oracles.parallel_dmtd import Shape

CPU = torch.device("cpu")


def test_every_profile_has_one_table_whatever_layers_have_it():
    tables = rotary_of(decoder_of(Shape()), 5, dtype=torch.float64, device=CPU)
    ((key, table),) = tables.items()
    assert key == (RotaryProfile(theta=10_000.0), 8)
    angle = 3 * 10_000.0 ** (-2 / 8)
    assert table.cos_ND.shape == table.sin_ND.shape == (5, 8)
    assert table.cos_ND.is_contiguous() and table.sin_ND.is_contiguous()
    assert math.isclose(float(table.cos_ND[3, 1]), math.cos(angle)) and math.isclose(float(table.sin_ND[3, 5]), math.sin(angle))


def test_the_attention_factor_is_in_the_table_once():
    shape = Shape(**yarn())
    table = rotary_of(decoder_of(shape), 5, dtype=torch.float64, device=CPU)[RotaryProfile(theta=1e4, scaling=YARN), 8]
    assert shape.rope_factor > 1.1
    assert torch.allclose(table.cos_ND**2 + table.sin_ND**2, torch.tensor(shape.rope_factor**2, dtype=torch.float64))
    assert math.isclose(float(table.sin_ND[3, 2]), shape.rope_factor * math.sin(3 * shape.frequencies[2]))
