"""What ranks of any layout hand over, and what they take from a directory, is the model that one process holds, bit for bit."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.families import ModelDescription, hf_tensors, write_fields
from megatron_dmtd.weights.specs import spec_of
from tests.support.ranks import run_ranks
from tests.support.tiny import VOCAB, tiny_config, with_settings

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


def loaded(config: Config, directory: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The stream after loading a directory, and this rank's rows of the vocabulary's padding."""
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import current_platform
    from megatron_dmtd.training.setup import build_models
    from megatron_dmtd.weights.ranks import load_directory, stream_ranks

    platform = current_platform()
    init_parallel(config, platform)
    models = build_models(with_settings(config, training={"seed": 7}), platform)
    load_directory(models, directory)
    tables = [weight for model in models for name, weight in model.named_parameters() if weight.shape[0] * 2 >= VOCAB]
    padding = [table[VOCAB - first :] for table in tables if (first := _first_row(table)) + len(table) > VOCAB]
    return {name: tensor.clone() for name, tensor in stream_ranks(models)}, [rows.detach().clone() for rows in padding]


def _first_row(table: torch.Tensor) -> int:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() * len(table)


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


@functools.cache
def directory_of(model: str, folder: Path) -> Path:
    config, weights = tiny_config("vanilla", model=MODELS[model]), whole(model)
    directory = folder / model
    write_hf_directory(
        directory,
        fields=write_fields(ModelDescription(model=config.model, cycle=config.cycle)),
        specs={name: spec_of(tensor) for name, tensor in weights.items()},
        tensors=weights.items(),
    )
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("directories")


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_of_any_layout_take_the_weights_of_a_directory(layout, model, folder):
    world_size, parallel = LAYOUTS.get(layout, (1, {}))
    config = tiny_config(model=MODELS[model], parallel=parallel)
    results = run_ranks(world_size, loaded, config, str(directory_of(model, folder)))
    expected = whole(model)
    for found, _ in results:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    padding = [rows for _, kept in results for rows in kept if len(rows)]
    assert padding and not any(rows.any() for rows in padding)
