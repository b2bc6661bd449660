"""The scaled feed-forward layer is its formula, on one rank and where two hold halves of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.models.looped import dory_config, random_dory
from tests.models.test_model import megatron_model
from tests.support.ranks import run_ranks


def _input() -> torch.Tensor:
    return torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def found(config: Config, weights: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the third layer's MLP in fp64, and the gradient of its input. `own`: this rank's tensors, if they differ."""
    mlp: Any = megatron_model(config, weights if not own else {}).double().decoder.layers[3].mlp
    if own:
        rank = torch.distributed.get_rank()
        mlp.load_state_dict({name: _part(name, tensor, rank) for name, tensor in own.items()})
    x = _input().requires_grad_()
    output, bias = mlp(x)
    assert bias is None
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def _part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    if name == "linear_fc1.weight":
        return torch.cat([half.chunk(2)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(2, dim=1 if name == "linear_fc2.weight" else 0)[rank]


def _expected(own: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = _input().requires_grad_()
    gate, up = (x @ half.t() * 32**0.5 for half in own["linear_fc1.weight"].chunk(2))
    inner = torch.nn.functional.silu(gate * own["gate_scale"]) * (up * own["up_scale"])
    output = (inner / (inner.square().sum(-1, keepdim=True) + 1e-6).sqrt()) @ own["linear_fc2.weight"].t()
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [1, 2])
def test_the_scaled_layer_is_its_formula(size: int) -> None:
    config = dory_config(parallel={"tensor": size})
    weights = {name: tensor.float() for name, tensor in random_dory(config.model).items()}
    prefix = "decoder.layers.3.mlp."
    own = {name.removeprefix(prefix): tensor.double() for name, tensor in weights.items() if name.startswith(prefix)}
    output, gradient = _expected(own)
    for rank_output, rank_gradient in run_ranks(size, found, config, weights, own if size > 1 else {}):
        torch.testing.assert_close(rank_output, output, atol=1e-12, rtol=0)
        torch.testing.assert_close(rank_gradient, gradient, atol=1e-12, rtol=1e-9)
