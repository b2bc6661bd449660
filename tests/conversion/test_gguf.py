"""GGUF files. A small one is written here with the format's own library; tests/functional reads a published one."""

import json
import sys

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.gguf import as_written, gguf_file
from megatron_dmtd.errors import CapabilityError, ConversionError
from megatron_dmtd.weights.safetensors_files import WeightFiles
from megatron_dmtd.weights.torch_dist import read_checkpoint_config
from tests.support.hf_models import random_hf_directory, save_tokenizer, small_model

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


#: transformers takes the head width of a Qwen3 GGUF file to be 128, whatever the file says
MODEL = small_model(vocab_size=300, head_dim=128)


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def write_gguf(path, hf_directory, tokenizer_dir, *, without=()) -> None:
    files = WeightFiles(hf_directory)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(MODEL.num_layers)
    writer.add_context_length(MODEL.max_position_embeddings)
    writer.add_embedding_length(MODEL.hidden_size)
    writer.add_feed_forward_length(MODEL.intermediate_size)
    writer.add_head_count(MODEL.num_attention_heads)
    writer.add_head_count_kv(MODEL.num_key_value_heads)
    writer.add_layer_norm_rms_eps(MODEL.rms_norm_eps)
    writer.add_rope_freq_base(MODEL.rope_theta)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokens = [tokenizer.convert_ids_to_tokens(index) or f"[unused{index}]" for index in range(MODEL.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(MODEL.vocab_size)])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(0)
    for name in files.specs:
        if name not in without:
            writer.add_tensor(gguf_name(name), files.read(name).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def source(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", vocab_size=300)
    hf = random_hf_directory(tmp_path / "hf", MODEL, tokenizer_dir=tokenizer)
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "model.gguf", hf, tokenizer)
    return tmp_path / "gguf"


@pytest.mark.parametrize("as_directory", [True, False])
def test_weights_and_tokenizer_of_a_gguf_file_are_imported(source, tmp_path, as_directory):
    made = import_hf(source if as_directory else source / "model.gguf", tmp_path / "start")
    assert made.cycle.is_vanilla and made.model.qk_norm and made.model.tie_word_embeddings
    assert (made.model.rms_norm_eps, made.model.rope_theta) == (MODEL.rms_norm_eps, MODEL.rope_theta)
    assert read_checkpoint_config(tmp_path / "start").data.tokenizer == str(tmp_path / "start" / "tokenizer")
    export_hf(tmp_path / "start", tmp_path / "out")
    expected, found = WeightFiles(tmp_path / "hf"), WeightFiles(tmp_path / "out")
    assert expected.specs == found.specs
    assert all(torch.equal(expected.read(name), found.read(name)) for name in expected.specs)
    text = "A cycle begins with its head."
    ids = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids and len(ids) > 5


@pytest.mark.parametrize("value", [1e-5, 1e-6, 1e6, 1e5, 0.02, 10_000.0, 500_000.0, 0.1])
def test_settings_that_went_through_single_precision_are_what_was_written(value):
    assert as_written(float(np.float32(value))) == value
    assert as_written(value) == value


def test_what_is_no_gguf_file_is_left_to_others(source, tmp_path):
    assert gguf_file(source) == gguf_file(source / "model.gguf") == source / "model.gguf"
    assert gguf_file(tmp_path / "hf") is None and gguf_file(tmp_path / "hf" / "config.json") is None
    assert gguf_file(tmp_path / "nothing") is None


def test_a_tensor_that_is_absent_is_not_made_up(source, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    write_gguf(source / "model.gguf", tmp_path / "hf", tmp_path / "tokenizer", without=(name,))
    with pytest.raises(ConversionError) as caught:
        import_hf(source, tmp_path / "start")
    assert f"missing: {name}" in caught.value.found


def test_several_files_are_refused(source):
    (source / "other.gguf").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"model\.gguf, other\.gguf"):
        gguf_file(source)


@pytest.mark.parametrize("size", [0, 100, 30_000])
def test_a_truncated_file_is_refused_and_nothing_written(source, tmp_path, size):
    path = source / "model.gguf"
    assert path.stat().st_size > 60_000
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConversionError, match=r"model\.gguf"):
        import_hf(source, tmp_path / "start")
    assert not [item for item in tmp_path.iterdir() if "start" in item.name]


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(source, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CapabilityError, match=f"pip install {package}"):
        import_hf(source, tmp_path / "start")
