"""Exports of the model's own code: what travels, and that it loads where this project is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.cycle import rule
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from megatron_dmtd.hf import DMTDQwen3ForCausalLM, DMTDQwen3Model
from megatron_dmtd.hf.remote_code import AUTO_MAP, code_files
from megatron_dmtd.weights.specs import spec_of
from tests.hf.tiny import each_variant, random_ids, tiny_model
from tests.support.tokenizers import chat_tokenizer

LOAD_ELSEWHERE = """
import sys, torch

class Absent:  # the project may be installed where the tests run; `make test` installs it
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron_dmtd", "megatron"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Absent())
try:
    import megatron_dmtd
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the project can be imported")
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
ids = torch.load(sys.argv[2])
with torch.no_grad():
    logits = model(ids).logits
tokens = model.generate(ids, max_new_tokens=7, do_sample=False)
model.save_pretrained(sys.argv[4])
torch.save((logits, tokens), sys.argv[3])
"""


def export(model: DMTDQwen3ForCausalLM, directory: Path, *, tokenizer_dir: str | None = None) -> Path:
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    specs = {name: spec_of(weight) for name, weight in weights.items()}
    fields = {**model.config.to_dict(), "architectures": ["DMTDQwen3ForCausalLM"]}
    fields.pop("dtype")
    write_hf_directory(directory, fields=fields, specs=specs, tensors=weights.items(), tokenizer_dir=tokenizer_dir)
    return directory


def test_an_export_loads_in_an_interpreter_without_this_project(tmp_path):
    model, ids = tiny_model("bidirectional-refresh", dtype=torch.float32), random_ids(2, 6)
    export(model, tmp_path / "export")
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
    assert set(code_files()) <= set(os.listdir(tmp_path / "again"))


READ_ELSEWHERE = """
import sys
sys.modules["megatron_dmtd"] = None
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)("ab ab<|mask|>").input_ids)
"""
READ_HERE = """
import sys
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from megatron_dmtd.inference.text import load_tokenizer as load_for_inference
import pathlib
for tokenizer in (load_tokenizer(sys.argv[1]), load_for_inference(pathlib.Path(sys.argv[1]))):
    print(tokenizer("ab ab<|mask|>").input_ids)
"""


@pytest.mark.parametrize(("program", "times"), [(READ_ELSEWHERE, 1), (READ_HERE, 2)], ids=["elsewhere", "here"])
def test_the_tokenizer_of_an_export_needs_no_code_and_asks_nothing(tmp_path, program, times):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", ["ab ab"], vocab_size=300)
    model = tiny_model("causal-refresh", dtype=torch.float32, vocab_size=300)
    directory = export(model, tmp_path / "export", tokenizer_dir=tokenizer)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(directory)]
    # Standard input stays open without an answer: whoever asks would wait.
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.wait(timeout=120)
        output, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 0, errors
    assert output == f"{load_tokenizer(tokenizer)('ab ab<|mask|>').input_ids}\n" * times
    assert not (tmp_path / "home" / "modules").exists(), "code of the export was copied to be run"


@each_variant
@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_and_fields_come_back_bitwise(tmp_path, variant, tied):
    model = tiny_model(variant, dtype=torch.bfloat16, tie_word_embeddings=tied)
    loaded = DMTDQwen3ForCausalLM.from_pretrained(export(model, tmp_path / "export"))
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    for field in ("dmtd_history_mode", "dmtd_block_attention", "mtp_horizon", "mask_token_id", "rope_parameters", "qk_norm"):
        assert getattr(loaded.config, field) == getattr(model.config, field)


def test_an_export_without_a_tokenizer_generates_by_the_defaults_of_transformers(tmp_path):
    directory = export(tiny_model("causal-refresh", dtype=torch.float32), tmp_path / "export")
    assert json.loads((directory / "generation_config.json").read_text()) == {}
    assert GenerationConfig.from_pretrained(directory).eos_token_id is None


def test_the_decoder_without_its_head_loads_too(tmp_path):
    model, ids = tiny_model("causal-refresh", dtype=torch.float32), random_ids(1, 6)
    decoder = AutoModel.from_pretrained(export(model, tmp_path / "export"))
    assert type(decoder) is DMTDQwen3Model
    assert torch.equal(model.lm_head(decoder(ids).last_hidden_state), model(ids).logits)


def test_the_configuration_points_to_the_code_and_the_code_is_there(tmp_path):
    directory = export(tiny_model("causal-refresh", dtype=torch.float32), tmp_path / "export")
    fields = json.loads((directory / "config.json").read_text())
    assert fields["model_type"] == "dmtdqwen3" and fields["architectures"] == ["DMTDQwen3ForCausalLM"]
    assert fields["auto_map"] == AUTO_MAP and fields["torch_dtype"] == "float32"
    for reference in AUTO_MAP.values():
        module, name = reference.split(".")
        assert f"class {name}(" in (directory / f"{module}.py").read_text()


def test_the_code_travels_verbatim(tmp_path):
    directory = export(tiny_model("causal-refresh", dtype=torch.float32), tmp_path / "export")
    assert (directory / "dmtd_cycles.py").read_bytes() == Path(rule.__file__).read_bytes()
    assert sorted(path.name for path in directory.glob("*.py")) == sorted(code_files())


def test_every_module_of_the_room_travels():
    packaged = {path.name for path in Path(rule.__file__).parents[1].joinpath("hf").glob("*.py")}
    assert packaged - {"__init__.py", "remote_code.py"} == set(code_files())
