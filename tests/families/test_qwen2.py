import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.families import read_fields
from tests.families.transformers_models import model_of, saved

WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}}


@pytest.mark.parametrize("fields", [{}, WINDOWS, YARN], ids=["plain", "windows", "yarn"])
@pytest.mark.parametrize("tied", [True, False])
def test_import_and_export_give_the_directory_back(tmp_path, fields, tied):
    model = model_of("qwen2", tie_word_embeddings=tied, **fields)
    source = saved(tmp_path / "hf", model)
    import_hf(source, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    first, second = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert first.keys() == second.keys() and any(name.endswith("q_proj.bias") for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)
    back, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"), torch.arange(40)[None]
    assert type(back) is type(model)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
    theirs, ours = (read_fields(json.loads((path / "config.json").read_text())) for path in (source, tmp_path / "out"))
    assert theirs == ours


def test_what_a_silent_config_means_is_what_transformers_assumes():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 32}
    theirs, model = Qwen2Config(**sizes), read_fields(sizes | {"model_type": "qwen2"}).model
    names = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    assert [getattr(model, name) for name in names] == [getattr(theirs, name) for name in names]
    assert (model.head_dim, model.qkv_bias, model.output_bias, model.qk_norm, model.sliding_window) == (2, True, False, False, 0)
