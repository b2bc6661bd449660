"""Initial weights depend on the seed and the name alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    """This rank's initial parameters, by their names in the whole model."""
    from megatron_dmtd.models.initialization import global_name
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.setup import build_models

    platform = prepare_megatron()
    init_parallel(config, platform)
    (model,) = build_models(config, platform)
    return {global_name(name, model): parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return run_ranks(1, initial_weights, tiny_config(model={"tie_word_embeddings": False}))[0]


def _config(**parallel: Any) -> Config:
    return tiny_config(model={"tie_word_embeddings": False}, parallel=parallel)


@pytest.mark.multiprocess
def test_stages_together_hold_the_weights_of_one_process(whole: dict[str, torch.Tensor]) -> None:
    stages = run_ranks(3, initial_weights, _config(pipeline=3, stage_layers=(2, 1, 1)))
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, tensor in stage.items():
            assert name not in found or torch.equal(found[name], tensor), f"two copies of {name} differ"
            found[name] = tensor
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.multiprocess
def test_tensor_ranks_together_hold_the_weights_of_one_process(whole: dict[str, torch.Tensor]) -> None:
    first, second = run_ranks(2, initial_weights, _config(tensor=2))
    for name, tensor in whole.items():
        if tensor.dim() == 1:
            joined = first[name]
        elif name.endswith("linear_fc1.weight"):
            halves = [part.chunk(2) for part in (first[name], second[name])]
            joined = torch.cat([halves[0][0], halves[1][0], halves[0][1], halves[1][1]])
        else:
            joined = torch.cat((first[name], second[name]), dim=1 if name.endswith(("proj.weight", "fc2.weight")) else 0)
        assert torch.equal(joined, tensor), name


@pytest.mark.multiprocess
def test_spread_seed_and_padding_are_as_documented(whole: dict[str, torch.Tensor]) -> None:
    config = _config()
    table = whole["embedding.word_embeddings.weight"]
    assert table[config.model.vocab_size :].abs().max() == 0
    assert table[: config.model.vocab_size].std().item() == pytest.approx(config.model.init_std, rel=0.1)
    to_residual = whole["decoder.layers.1.mlp.linear_fc2.weight"].std().item()
    assert to_residual == pytest.approx(config.model.init_std / (2 * config.model.num_layers) ** 0.5, rel=0.1)
    assert not torch.equal(whole["decoder.layers.0.mlp.linear_fc1.weight"], whole["decoder.layers.1.mlp.linear_fc1.weight"])
    other = run_ranks(1, initial_weights, tiny_config(model={"tie_word_embeddings": False}, training={"seed": 7}))[0]
    assert not torch.equal(other["output_layer.weight"], whole["output_layer.weight"])
