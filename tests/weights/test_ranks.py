"""What ranks of any layout hand over is the model that one process holds, bit for bit."""

import functools
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.families import hf_tensors
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2, virtual 2": (2, {"pipeline": 2, "virtual_stages": 2}),
    "tensor 2, pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"qkv_bias": True, "output_bias": True, "qk_norm": False},
}


def streamed(config: Config) -> dict[str, torch.Tensor]:
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import current_platform
    from megatron_dmtd.training.setup import build_models
    from megatron_dmtd.weights.ranks import stream_ranks

    platform = current_platform()
    init_parallel(config, platform)
    models = build_models(config, platform)
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zeros at first: make them tell ranks apart
                parameter.data.copy_(distinct(parameter))
    return {name: tensor.clone() for name, tensor in stream_ranks(models)}


def distinct(parameter: torch.Tensor) -> torch.Tensor:
    """Numbers that count on over the tensor-parallel ranks' parts of a bias."""
    from megatron.core import parallel_state

    is_split = getattr(parameter, "tensor_model_parallel", False)
    first = parallel_state.get_tensor_model_parallel_rank() * parameter.numel() if is_split else 0
    return torch.arange(first, first + parameter.numel(), dtype=parameter.dtype)


@functools.cache
def whole(model: str) -> dict[str, torch.Tensor]:
    return run_ranks(1, streamed, tiny_config(model=MODELS[model]))[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_stream_is_the_whole_model_on_every_rank(layout, model):
    world_size, parallel = LAYOUTS[layout]
    config = tiny_config(model=MODELS[model], parallel=parallel)
    expected = whole(model)
    shapes = {name: tensor.shape for name, tensor in hf_tensors(decoder_of(config.model)).items()}
    assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == shapes
    for found in run_ranks(world_size, streamed, config):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
