"""The stand-in for Apex's FusedAdam against torch's AdamW and Adam. Level: bitwise, they call one kernel."""

from __future__ import annotations

import pytest
import torch

from megatron_dmtd.platform.adam import FusedAdam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _trajectory(make: type[torch.optim.Optimizer], **settings: object) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(7, 5, generator=generator)) for _ in range(2)]
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}], **(SETTINGS | settings))  # type: ignore[call-arg]
    for _ in range(5):
        for param in params:
            param.grad = torch.randn(7, 5, generator=generator)
        optimizer.step()
    return params


def test_five_steps_equal_torchs_fused_adamw() -> None:
    for ours, theirs in zip(_trajectory(FusedAdam), _trajectory(torch.optim.AdamW, fused=True), strict=True):
        assert torch.equal(ours, theirs)


def test_l2_mode_equals_torchs_fused_adam() -> None:
    for ours, theirs in zip(_trajectory(FusedAdam, adam_w_mode=False), _trajectory(torch.optim.Adam, fused=True), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_are_counted_per_group_and_parameters_without_a_gradient_wait() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad = torch.ones(3)
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [1, None]
    assert torch.equal(second, torch.ones(3))
    assert "step" not in optimizer.state[first]
    with pytest.raises(AssertionError):
        optimizer.step(lambda: None)
