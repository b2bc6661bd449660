import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.hf.remote_code import code_files
from megatron_dmtd.weights.specs import spec_of
from tests.support.hf_models import VANILLA, random_hf_directory, save_tokenizer, small_model

CYCLE = CycleConfig(variant="causal-refresh", num_parallel_layers=2, mask_token_id=2)
FIELDS = write_fields(ModelDescription(model=small_model(), cycle=VANILLA))


def write(directory, tensors, **options):
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    write_hf_directory(directory, fields=FIELDS, specs=specs, tensors=tensors.items(), **options)
    return json.loads((directory / "config.json").read_text())


def test_the_type_is_stated_unless_the_weights_mix_several(tmp_path):
    half = torch.zeros(2, dtype=torch.bfloat16)
    assert write(tmp_path / "one", {"a": half})["torch_dtype"] == "bfloat16"
    assert "torch_dtype" not in write(tmp_path / "two", {"a": half, "b": torch.zeros(2)})


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield "a", torch.zeros(2)
        raise RuntimeError("the source is gone")

    specs = {name: spec_of(torch.zeros(2)) for name in "ab"}
    with pytest.raises(RuntimeError, match="the source is gone"):
        write_hf_directory(tmp_path / "out", fields=FIELDS, specs=specs, tensors=broken())
    assert list(tmp_path.iterdir()) == []


def test_a_used_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConversionError, match="not an empty directory"):
        write(tmp_path, {"a": torch.zeros(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_only_models_with_cycles_carry_code_and_a_vanilla_export_needs_none(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    hf = random_hf_directory(tmp_path / "hf", small_model(vocab_size=300), cycle=CYCLE, tokenizer_dir=tokenizer)
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "dmtd")
    export_hf(tmp_path / "start", tmp_path / "vanilla", as_vanilla=True)
    assert {path.name for path in (tmp_path / "dmtd").glob("*.py")} == set(code_files())
    assert list((tmp_path / "vanilla").glob("*.py")) == []
    assert "auto_map" not in json.loads((tmp_path / "vanilla" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "vanilla")
    assert type(model) is Qwen3ForCausalLM and model.generation_config.eos_token_id == 0
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.isfinite().all() and logits.std() > 0.2
