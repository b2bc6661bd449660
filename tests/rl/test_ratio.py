"""The truncated ratio against float64."""

import math

import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.rl import truncated_ratio


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)])
def test_the_ratio_is_that_of_the_formula_without_gradient(shape):
    generator = torch.Generator().manual_seed(0)
    old, rollout = (torch.randn(shape, generator=generator).mul(2).requires_grad_() for _ in range(2))
    found = truncated_ratio(old, rollout, 5.0)
    assert not found.requires_grad and found.shape == shape
    assert torch.allclose(found.double(), torch.exp(old.double() - rollout.double()).clamp(max=5), rtol=1e-6)


def test_the_bound_holds_from_above_only():
    old = torch.tensor([0.0, math.log(4.9), math.log(5.1), 1e4, -1e4])
    assert truncated_ratio(old, torch.zeros(5), 5).tolist() == pytest.approx([1, 4.9, 5, 5, 0])


@pytest.mark.parametrize("bound", [0, -1.0, math.nan])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ConfigError, match="above 0"):
        truncated_ratio(torch.zeros(1), torch.zeros(1), bound)


def test_other_tokens_are_refused():
    with pytest.raises(DataError, match="one per token"):
        truncated_ratio(torch.zeros(3), torch.zeros(1), 5)
