import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dmtd.errors import ConversionError
from megatron_dmtd.families import hf_tensors, read_directory
from megatron_dmtd.weights.hf_directory import open_directory
from tests.support.hf_models import random_hf_directory, small_model

FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return random_hf_directory(tmp_path / "model", small_model(tie_word_embeddings=True))


def with_tensors(directory: Path, **added: torch.Tensor) -> Path:
    path = directory / "model.safetensors"
    save_file(load_file(path) | added, path, metadata={"format": "pt"})
    return directory


def frequencies_of(directory: Path) -> torch.Tensor:
    model = read_directory(directory).model
    return 1.0 / model.rope_theta ** (torch.arange(0, model.head_dim, 2).float() / model.head_dim)


def test_every_tensor_comes_once_in_the_order_of_the_layers(directory):
    stored = load_file(directory / "model.safetensors")
    found = list(open_directory(directory))
    assert [name for name, _ in found] == list(hf_tensors(read_directory(directory).decoder))
    assert sorted(name for name, _ in found) == sorted(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found)


def test_frequencies_of_older_writers_are_checked_and_left_out(directory):
    with_tensors(directory, **{FREQUENCIES: frequencies_of(directory)})
    assert FREQUENCIES not in dict(open_directory(directory))
    with_tensors(directory, **{FREQUENCIES: frequencies_of(directory) * 1.01})
    with pytest.raises(ConversionError, match="frequencies that are not those of the configuration"):
        open_directory(directory)


def test_a_second_tied_head_must_be_the_table(directory):
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    with_tensors(directory, **{"lm_head.weight": table.clone()})
    assert "lm_head.weight" not in dict(open_directory(directory))
    with_tensors(directory, **{"lm_head.weight": table + 1})
    with pytest.raises(ConversionError, match=r"differs from model\.embed_tokens\.weight"):
        open_directory(directory)


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(32), "unknown: model.layers.0.self_attn.q_proj.bias"),
        ("model.layers.0.self_attn.sinks", torch.zeros(4), "unknown: model.layers.0.self_attn.sinks"),
    ],
)
def test_what_the_configuration_does_not_know_is_refused(directory, name, tensor, found):
    with_tensors(directory, **{name: tensor})
    with pytest.raises(ConversionError, match=found):
        open_directory(directory)


def test_two_sets_of_weights_in_one_folder_are_refused(directory):
    weight_map = dict.fromkeys(load_file(directory / "model.safetensors"), "model-00001-of-00001.safetensors")
    save_file(
        load_file(directory / "model.safetensors"), directory / "model-00001-of-00001.safetensors", metadata={"format": "pt"}
    )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConversionError, match="transformers loads the single file"):
        open_directory(directory)
    (directory / "model.safetensors").unlink()
    assert len(dict(open_directory(directory))) == len(weight_map)


def test_an_index_that_names_the_single_file_is_no_second_set(directory):
    weight_map = dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(dict(open_directory(directory))) == len(weight_map)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_next_to_the_model_is_refused(directory, name):
    (directory / name).write_text("{}")
    with pytest.raises(ConversionError, match="merge the adapter"):
        open_directory(directory)
