"""GGUF files. A small one is written here with the format's own library; tests/functional reads a published one."""

import dataclasses
import json
import sys

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.gguf import as_written, gguf_file
from megatron_dmtd.errors import CapabilityError, ConversionError, DMTDError
from megatron_dmtd.weights.checkpoint_files import saved_config
from megatron_dmtd.weights.safetensors_files import WeightFiles
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


MODEL = small_model(vocab_size=300)


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        part, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
        name.removesuffix(".weight")
    ] + ".weight"


def twisted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As the format's llama files hold q and k: rotated pairs side by side."""
    heads = {"q_proj": MODEL.num_attention_heads, "k_proj": MODEL.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, MODEL.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def write_gguf(path, hf_directory, tokenizer_dir, *, arch="qwen3", without=(), extra=(), settings=()) -> None:
    """`extra`: (name, array) of more tensors; `settings`: (name, value) of more metadata."""
    files = WeightFiles(hf_directory)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(MODEL.num_layers)
    writer.add_context_length(MODEL.max_position_embeddings)
    writer.add_embedding_length(MODEL.hidden_size)
    writer.add_feed_forward_length(MODEL.intermediate_size)
    writer.add_head_count(MODEL.num_attention_heads)
    writer.add_head_count_kv(MODEL.num_key_value_heads)
    writer.add_layer_norm_rms_eps(MODEL.rms_norm_eps)
    writer.add_rope_freq_base(MODEL.rope_theta)
    for name, value in settings:
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](f"{arch}.{name}", value)
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
            tensor = files.read(name)
            writer.add_tensor(gguf_name(name), (twisted(name, tensor) if arch == "llama" else tensor).numpy().astype(np.float32))
    for name, numbers in extra:
        writer.add_tensor(name, np.asarray(numbers, dtype=np.float32))
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
    assert saved_config(tmp_path / "start").data.tokenizer == str(tmp_path / "start" / "tokenizer")
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


def test_a_missing_package_is_named(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CapabilityError, match="pip install gguf"):
        import_hf(source, tmp_path / "start")


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"qk_norm": False}),
        ("llama", {"qk_norm": False, "tie_word_embeddings": False}),
        ("qwen2", {"qk_norm": False, "qkv_bias": True}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_every_architecture_gives_back_the_weights_and_transformers_logits(tmp_path, arch, changes):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", vocab_size=300)
    model = dataclasses.replace(MODEL, **changes)
    hf = random_hf_directory(tmp_path / "hf", model, tokenizer_dir=tokenizer)
    (tmp_path / "gguf").mkdir()
    # transformers takes a head of Qwen3 to be 128 wide unless the file says otherwise
    settings = [("attention.key_length", model.head_dim), ("attention.value_length", model.head_dim)] if arch == "qwen3" else []
    write_gguf(tmp_path / "gguf" / "model.gguf", hf, tokenizer, arch=arch, settings=settings)
    import_hf(tmp_path / "gguf", tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    expected, found = WeightFiles(hf), WeightFiles(tmp_path / "out")
    assert expected.specs == found.specs
    assert all(torch.equal(expected.read(name), found.read(name)) for name in expected.specs)
    if arch != "qwen3":  # whose key_length transformers does not read
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32)
        ours, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(40)[None]
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("extra", "settings", "named"),
    [
        ([("blk.0.attn_q.bias", np.ones(32))], [], "unknown: blk.0.attn_q.bias [32]"),
        ([("blk.1.attn_sinks", np.ones(4))], [], "unknown: blk.1.attn_sinks [4]"),
        ([("blk.0.post_attention_norm.weight", np.ones(32))], [], "unknown: blk.0.post_attention_norm.weight [32]"),
        ([("rope_freqs.weight", np.ones(4))], [], "unknown: rope_freqs.weight [4]"),
        ([], [("attention.sliding_window", 8)], "qwen3.attention.sliding_window 8"),
        ([], [("attn_logit_softcapping", 50.0)], "qwen3.attn_logit_softcapping 50.0"),
        ([], [("expert_count", 8)], "qwen3.expert_count 8"),
        ([], [("attention.scale", 0.5)], "qwen3.attention.scale 0.5"),
        ([], [("attention.key_length", 16)], "qwen3.attention.key_length 16, where the rest of the file says 8"),
        ([], [("rope.dimension_count", 4)], "qwen3.rope.dimension_count 4, where the rest of the file says 8"),
        ([], [("rope.scaling.factor", 4.0)], "rope.scaling.factor 4.0 without rope.scaling.type"),
    ],
)
def test_what_has_no_place_in_the_model_is_refused_by_name(source, tmp_path, extra, settings, named):
    write_gguf(source / "model.gguf", tmp_path / "hf", tmp_path / "tokenizer", extra=extra, settings=settings)
    with pytest.raises(DMTDError) as caught:
        import_hf(source, tmp_path / "start")
    assert named in caught.value.found
    assert not (tmp_path / "start").exists()


def test_scaled_rotary_frequencies_are_imported(source, tmp_path):
    settings = [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.scaling.original_context_length", 64),
        ("attention.sliding_window", 0),
    ]
    write_gguf(source / "model.gguf", tmp_path / "hf", tmp_path / "tokenizer", settings=settings)
    scaling = import_hf(source, tmp_path / "start").model.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 64)
