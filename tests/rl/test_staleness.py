"""Which versions are recent enough."""

import torch

from megatron_dmtd.rl import fresh


def test_a_version_is_fresh_up_to_the_difference():
    assert [fresh(version, 7, 3) for version in (3, 4, 7)] == [False, True, True]


def test_many_versions_are_judged_one_by_one():
    assert fresh(torch.tensor([[3, 4], [7, 0]]), 7, 3).tolist() == [[False, True], [True, False]]
    assert fresh([3, 4], 7, 3).tolist() == [False, True]
