from dataclasses import replace

import pytest
import torch

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.compare import compare
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.sources import open_source
from megatron_dmtd.weights.safetensors_files import WeightFiles, write_weights
from tests.support.hf_models import change_fields, random_hf_directory, small_model

CYCLE = CycleConfig(variant="causal-refresh", num_parallel_layers=2, mask_token_id=99)
NUM_TENSORS = 1 + 4 * 11 + 1


def change_tensor(directory, name, change):
    files = WeightFiles(directory)
    tensors = {key: files.read(key) for key in files.specs} | {name: change(files.read(name))}
    specs = {key: replace(files.specs[key], dtype=tensor.dtype) for key, tensor in tensors.items()}
    write_weights(directory, specs, tensors.items())


@pytest.fixture
def hf(tmp_path):
    return random_hf_directory(tmp_path / "hf", small_model(), cycle=CYCLE)


def test_a_directory_equals_its_import_and_the_export_of_that(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    for other in ("start", "out"):
        for pair in ((hf, tmp_path / other), (tmp_path / other, hf)):
            comparison = compare(*map(open_source, pair))
            assert comparison.is_equal and comparison.num_equal == NUM_TENSORS


def test_a_changed_number_is_found_and_measured(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    name = "model.layers.2.self_attn.k_proj.weight"

    def change(tensor):
        tensor[3, 4] += 0.5
        return tensor

    norm = WeightFiles(hf).read(name).norm().item()
    change_tensor(hf, name, change)
    comparison = compare(open_source(tmp_path / "start"), open_source(hf))
    assert comparison.num_equal == NUM_TENSORS - 1 and not comparison.is_equal
    (difference,) = comparison.values
    assert (difference.name, difference.num_different, difference.num_elements) == (name, 1, 16 * 32)
    assert difference.largest == pytest.approx(0.5, abs=1e-6) and difference.relative == pytest.approx(0.5 / norm, rel=1e-5)


def test_bits_are_compared_not_values(hf, tmp_path):
    other = random_hf_directory(tmp_path / "other", small_model(), cycle=CYCLE)
    change_tensor(hf, "model.norm.weight", torch.zeros_like)
    change_tensor(other, "model.norm.weight", lambda tensor: -torch.zeros_like(tensor))
    assert [item.name for item in compare(open_source(hf), open_source(other)).values] == ["model.norm.weight"]
    for directory in (hf, other):
        change_tensor(directory, "model.norm.weight", lambda tensor: torch.full_like(tensor, torch.nan))
    assert compare(open_source(hf), open_source(other)).is_equal


def test_types_are_compared_and_a_cast_is_accounted_for(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "narrow", dtype=torch.bfloat16)
    pair = open_source(hf), open_source(tmp_path / "narrow")
    plain = compare(*pair)
    assert len(plain.structure) == NUM_TENSORS and plain.num_equal == 0
    assert "model.norm.weight is float32 [32] and bfloat16 [32]" in plain.structure
    assert "model.norm.weight" in [item.name for item in plain.values]
    assert compare(*pair, dtype=torch.bfloat16).is_equal


def test_methods_are_compared_unless_they_do_not_matter(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "vanilla", as_vanilla=True)
    pair = open_source(tmp_path / "start"), open_source(tmp_path / "vanilla")
    assert compare(*pair).settings == ["cycle.variant is causal-refresh and vanilla"], "it has no MASK that could be another"
    assert compare(*pair).differs_in_method_only
    assert compare(*pair, ignore_cycles=True).is_equal
    plain = random_hf_directory(tmp_path / "plain", small_model())
    assert not [line for line in compare(open_source(plain), pair[1]).settings if line.startswith("cycle.")]


def test_settings_that_change_the_numbers_are_compared_and_others_are_not(hf, tmp_path):
    other = random_hf_directory(tmp_path / "other", small_model(), cycle=CYCLE)
    change_fields(other, max_position_embeddings=512, initializer_range=0.5)
    assert compare(open_source(hf), open_source(other)).is_equal
    change_fields(other, rope_theta=5e3, rope_parameters=None)
    assert compare(open_source(hf), open_source(other)).settings == ["model.rope_theta is 10000.0 and 5000.0"]


def test_models_of_other_shapes_differ_by_name(hf, tmp_path):
    larger = random_hf_directory(tmp_path / "larger", small_model(num_layers=5, intermediate_size=56, tie_word_embeddings=False))
    comparison = compare(open_source(hf), open_source(larger), ignore_cycles=True)
    assert comparison.settings == [
        "model.num_layers is 4 and 5",
        "model.intermediate_size is 48 and 56",
        "model.tie_word_embeddings is True and False",
    ]
    assert f"lm_head.weight is in {larger} only" in comparison.structure
    assert "model.layers.0.mlp.up_proj.weight is float32 [48, 32] and float32 [56, 32]" in comparison.structure
    assert len([line for line in comparison.structure if "model.layers.4." in line]) == 11
    assert comparison.num_equal >= 1
    backwards = compare(open_source(larger), open_source(hf), ignore_cycles=True)
    assert len(backwards.structure) == len(comparison.structure) and backwards.num_equal == comparison.num_equal
