"""The unit norm is its formula, and so is its gradient, on one rank and where ranks hold parts of the vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

EPS = 1e-6


def _formula(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_unit_norm_and_its_gradient_are_autograds() -> None:
    from megatron_dmtd.models.norm import unit

    x, weight = _random(3, 5, 8), _random(3, 5, 8).flip(0)
    x[0, 0] *= 1e-4  # a vector that the epsilon shortens
    own, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    (unit(own, EPS) * weight).sum().backward()
    (_formula(plain) * weight).sum().backward()
    assert float(unit(x, EPS)[0, 0].norm()) < 0.5 and float(unit(x, EPS)[1, 1].norm()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(own.grad, plain.grad, atol=1e-12, rtol=1e-12)


def test_bf16_vectors_are_divided_in_fp32() -> None:
    from megatron_dmtd.models.norm import unit

    x = _random(4, 64).bfloat16()
    torch.testing.assert_close(unit(x, EPS), _formula(x.float()).bfloat16(), atol=0, rtol=0)


def parts(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the divided vectors, and of the gradient of a loss to which each rank adds its part."""
    from megatron_dmtd.models.norm import unit

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = x.chunk(size, dim=-1)[rank].clone().requires_grad_()
    divided = unit(own, EPS, group=torch.distributed.group.WORLD)
    (divided * weight.chunk(size, dim=-1)[rank]).sum().backward()
    assert own.grad is not None
    return divided.detach(), own.grad


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_hold_parts_of_a_vector_divide_by_the_whole(size: int) -> None:
    x, weight = _random(3, 5, 8), _random(3, 5, 8).flip(0)
    whole = x.clone().requires_grad_()
    expected = _formula(whole)
    (expected * weight).sum().backward()
    found: list[Any] = run_ranks(size, parts, weight, x)
    torch.testing.assert_close(torch.cat([divided for divided, _ in found], -1), expected.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], -1), whole.grad, atol=1e-12, rtol=0)
