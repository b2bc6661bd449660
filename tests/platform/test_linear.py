"""Megatron's parallel linear layers with our products against Megatron's own: the same numbers, communication included.

Level: bitwise where torch multiplies, fp32 rounding where oneDNN does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.parallel.groups import init_parallel
from megatron_dmtd.platform import prepare_megatron, products
from tests.platform.test_products import all_take
from tests.support.ranks import run_ranks

SLOTS, BATCH, HIDDEN, OUTER = 12, 2, 48, 64


def megatrons_functions(layers: Any) -> tuple[type, type]:
    """As they were before `platform.cpu` replaced them, on the CPU."""
    spec = importlib.util.find_spec(layers.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = layers.torch  # type: ignore[attr-defined]
    return module.LinearWithGradAccumulationAndAsyncCommunication, module.LinearWithFrozenWeight


def both_ways(sequence_parallel: bool) -> dict[tuple[str, bool], list[list[torch.Tensor]]]:
    """By product and whether the first layer is frozen: output and gradients, by Megatron's functions and by ours."""
    base = Config()
    parallel = dataclasses.replace(base.parallel, tensor=2, sequence_parallel=sequence_parallel)
    init_parallel(dataclasses.replace(base, parallel=parallel), prepare_megatron())
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
    from megatron.core.transformer import TransformerConfig

    products.SMALL, calls, onednn = 0, [], products._onednn
    products.PRODUCTS["onednn"] = lambda *operands: calls.append(1) or onednn(*operands)  # type: ignore[func-returns-value]
    ours = layers.LinearWithGradAccumulationAndAsyncCommunication, layers.LinearWithFrozenWeight
    assert [function.__module__ for function in ours] == ["megatron_dmtd.platform.linear"] * 2
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    settings: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": False}
    torch.manual_seed(3)
    up = ColumnParallelLinear(HIDDEN, OUTER, gather_output=False, **settings)
    down = RowParallelLinear(OUTER, HIDDEN, input_is_parallel=True, **settings)
    x = torch.randn(SLOTS, BATCH, HIDDEN)
    if sequence_parallel:
        x = x.chunk(2)[torch.distributed.get_rank()]

    def results() -> list[torch.Tensor]:
        own = x.clone().requires_grad_()
        for layer in (up, down):
            layer.zero_grad(set_to_none=True)
        out, _ = down(up(own)[0])
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        gradients = [p.grad for p in (own, *up.parameters(), *down.parameters()) if p.grad is not None]
        return [out.detach(), *gradients]

    found = {}
    for name in ("torch", "onednn"):
        products.choices_of_this_machine = lambda name=name: all_take(name)  # type: ignore[assignment, misc]
        for frozen in (False, True):
            up.weight.requires_grad_(not frozen)
            found[name, frozen] = []
            for pair in (megatrons_functions(layers), ours):
                layers.LinearWithGradAccumulationAndAsyncCommunication, layers.LinearWithFrozenWeight = pair
                found[name, frozen].append(results())
    assert len(calls) == 6 + 5, "three products of each layer, two of a frozen one"
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parallel_layers_give_megatrons_outputs_and_gradients(sequence_parallel: bool) -> None:
    for rank in run_ranks(2, both_ways, sequence_parallel):
        for (name, frozen), (theirs, ours) in rank.items():
            assert len(theirs) == len(ours) == (4 if frozen else 6)
            for mine, its in zip(ours, theirs, strict=True):
                assert mine.abs().max() > 0.1
                if name == "torch":
                    assert torch.equal(mine, its)
                else:
                    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)
