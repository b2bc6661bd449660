import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, GenerationConfig

from megatron_dmtd.cycle import rule
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.hf import DMTDQwen3ForCausalLM, DMTDQwen3Model
from megatron_dmtd.hf.export import CODE_FILES, expected_shapes, save_export
from tests.hf.tiny import each_variant, random_ids, tiny_config, tiny_model

LOAD_ELSEWHERE = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM
assert importlib.util.find_spec("megatron_dmtd") is None, sys.path
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
ids = torch.load(sys.argv[2])
with torch.no_grad():
    logits = model(ids).logits
tokens = model.generate(ids, max_new_tokens=7, do_sample=False)
model.save_pretrained(sys.argv[4])
torch.save((logits, tokens), sys.argv[3])
"""


def test_an_export_loads_in_an_interpreter_without_this_project(tmp_path):
    model, ids = tiny_model("bidirectional-refresh", dtype=torch.float32), random_ids(2, 6)
    save_export(tmp_path / "export", config=model.config, tensors=model.state_dict())
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [tmp_path / name for name in ("export", "ids.pt", "out.pt", "again")]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    environment.pop("HF_MODULES_CACHE", None)
    # -I: neither the working directory nor the environment adds to the path.
    command = [sys.executable, "-I", "-c", LOAD_ELSEWHERE, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    logits, tokens = torch.load(tmp_path / "out.pt")
    assert torch.equal(logits, model(ids).logits) and logits.std() > 1
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=7, do_sample=False))
    assert {*CODE_FILES, "dmtd_cycles.py"} <= set(os.listdir(tmp_path / "again"))


@each_variant
@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_and_fields_come_back_bitwise(tmp_path, variant, tied):
    model = tiny_model(variant, dtype=torch.bfloat16, tie_word_embeddings=tied, eos_token_id=5)
    save_export(tmp_path / "export", config=model.config, tensors=model.state_dict())
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied
    loaded = DMTDQwen3ForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    for field in ("dmtd_history_mode", "dmtd_block_attention", "mtp_horizon", "mask_token_id", "rope_parameters", "qk_norm"):
        assert getattr(loaded.config, field) == getattr(model.config, field)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == 5


def test_the_decoder_without_its_head_loads_too(tmp_path):
    model, ids = tiny_model("causal-refresh", dtype=torch.float32), random_ids(1, 6)
    save_export(tmp_path / "export", config=model.config, tensors=model.state_dict())
    decoder = AutoModel.from_pretrained(tmp_path / "export")
    assert type(decoder) is DMTDQwen3Model
    assert torch.equal(model.lm_head(decoder(ids).last_hidden_state), model(ids).logits)


def test_the_configuration_file_serves_both_generations_of_transformers(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 256}
    model = tiny_model("causal-refresh", dtype=torch.float32, rope_parameters=rope)
    save_export(tmp_path / "export", config=model.config, tensors=model.state_dict())
    fields = json.loads((tmp_path / "export" / "config.json").read_text())
    assert fields["model_type"] == "dmtdqwen3" and fields["architectures"] == ["DMTDQwen3ForCausalLM"]
    assert fields["auto_map"]["AutoModelForCausalLM"] == "modeling_dmtd_qwen3.DMTDQwen3ForCausalLM"
    assert fields["torch_dtype"] == "float32"
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] == 500.0
    assert fields["rope_scaling"] == {key: value for key, value in fields["rope_parameters"].items() if key != "rope_theta"}
    assert "_name_or_path" not in fields
    assert DMTDQwen3ForCausalLM.from_pretrained(tmp_path / "export").config.rope_parameters == model.config.rope_parameters


def test_the_rule_of_cycles_travels_verbatim(tmp_path):
    model = tiny_model("causal-refresh", dtype=torch.float32)
    save_export(tmp_path / "export", config=model.config, tensors=model.state_dict())
    assert (tmp_path / "export" / "dmtd_cycles.py").read_bytes() == Path(rule.__file__).read_bytes()


def test_weights_stream_into_shards_of_bounded_size_with_an_index(tmp_path):
    model = tiny_model("causal-refresh", dtype=torch.float32)
    pairs = iter(sorted(model.state_dict().items(), reverse=True))
    save_export(tmp_path / "export", config=model.config, tensors=pairs, dtype=torch.bfloat16, shard_bytes=9000)
    files = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(weight.numel() for weight in model.state_dict().values())
    contents = {file: load_file(tmp_path / "export" / file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in contents.items() for name in tensors}
    for tensors in contents.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 9000
    loaded = DMTDQwen3ForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(weight.bfloat16(), loaded[name]) for name, weight in model.state_dict().items())


def test_tokenizer_files_are_copied_and_nothing_else(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "qwen.tiktoken", "model.safetensors", "notes.txt"):
        (source / name).write_text(name)
    model = tiny_model("causal-refresh", dtype=torch.float32)
    save_export(tmp_path / "export", config=model.config, tensors=model.state_dict(), tokenizer_dir=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "qwen.tiktoken"):
        assert (tmp_path / "export" / name).read_text() == name
    assert not (tmp_path / "export" / "notes.txt").exists()
    assert (tmp_path / "export" / "model.safetensors").stat().st_size > 10_000


def test_an_empty_directory_is_taken_and_a_used_one_is_refused_untouched(tmp_path):
    model = tiny_model("causal-refresh", dtype=torch.float32)
    (tmp_path / "empty").mkdir()
    save_export(tmp_path / "empty", config=model.config, tensors=model.state_dict())
    assert (tmp_path / "empty" / "config.json").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("kept")
    for target in (tmp_path / "used", tmp_path / "used" / "file"):
        with pytest.raises(ConversionError, match="is in use"):
            save_export(target, config=model.config, tensors=model.state_dict())
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "used"]


def wrong_weights():
    tied = tiny_model("causal-refresh", dtype=torch.float32, tie_word_embeddings=True)
    weights = dict(tied.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: value for key, value in weights.items() if key != name}
    yield "missing", without, rf"weights missing: \['{name}'\]"
    yield "missing-stream", without.items(), rf"weights missing: \['{name}'\]"
    yield "unknown", {**weights, "model.extra": torch.zeros(1)}, r"not of this model: \['model.extra'\]"
    yield "unknown-stream", [("model.extra", torch.zeros(1))], "model.extra, which is no weight"
    yield "twice", [("model.norm.weight", weights["model.norm.weight"])] * 2, "model.norm.weight twice"
    yield "shape", {**weights, name: torch.zeros(48, 33)}, r"up_proj.weight of shape \(48, 33\)"
    yield "types", {**weights, name: weights[name].bfloat16()}, "up_proj.weight of type torch.bfloat16"
    yield "untied", {**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, "lm_head.weight differs"


@pytest.mark.parametrize(("tensors", "found"), [case[1:] for case in wrong_weights()], ids=[case[0] for case in wrong_weights()])
def test_weights_that_are_not_exactly_the_models_leave_no_directory(tmp_path, tensors, found):
    config = tiny_config("causal-refresh", tie_word_embeddings=True)
    with pytest.raises(ConversionError, match=found):
        save_export(tmp_path / "export", config=config, tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_tokenizer_is_refused_before_anything_is_written(tmp_path):
    model = tiny_model("causal-refresh", dtype=torch.float32)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConversionError, match="no tokenizer file"):
        save_export(tmp_path / "x", config=model.config, tensors=model.state_dict(), tokenizer_dir=tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["none"]


def test_expected_shapes_leave_out_the_tied_head():
    tied = expected_shapes(tiny_config("causal-refresh", tie_word_embeddings=True))
    untied = expected_shapes(tiny_config("causal-refresh"))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert untied["model.layers.3.self_attn.k_proj.weight"] == (16, 32)
