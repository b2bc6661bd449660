"""Advantages of groups against float64 arithmetic of the standard library."""

import statistics

import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.rl import group_advantages


@pytest.mark.parametrize("size", [2, 4, 8])
def test_advantages_are_those_of_the_formula(size):
    rewards = torch.rand(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for start in range(0, 32, size):
        group = rewards[start : start + size].tolist()
        expected += [(r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) for r in group]
    found = group_advantages(rewards, size)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(group_advantages(rewards.float(), size).double(), found, atol=1e-5)


def test_integer_rewards_and_groups_next_to_each_other():
    found = group_advantages(torch.tensor([1, 0, 5, 5, 0, 1]), 2)
    half = 0.5 / (0.5**0.5 + 1e-4)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx([half, -half, 0, 0, -half, half])


@pytest.mark.parametrize(("rewards", "size"), [([0.1] * 6, 3), ([0.3, 7.0, 1e9], 1), ([], 4), ([True, True], 2)])
def test_equal_rewards_and_groups_of_one_get_exactly_zero(rewards, size):
    assert group_advantages(torch.tensor(rewards), size).tolist() == [0.0] * len(rewards)


def test_there_is_no_gradient():
    assert not group_advantages(torch.tensor([1.0, 2.0], requires_grad=True), 2).requires_grad


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_of_nothing_is_refused(size):
    with pytest.raises(ConfigError, match="at least 1"):
        group_advantages(torch.ones(4), size)


@pytest.mark.parametrize(
    "rewards", [torch.ones(5), torch.ones(2, 2), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])]
)
def test_rewards_that_make_no_groups_are_refused(rewards):
    with pytest.raises(DataError):
        group_advantages(rewards, 2)
