import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MistralConfig

from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.errors import ModelError
from megatron_dmtd.families import read_fields
from tests.families.transformers_models import model_of, saved

YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}}


@pytest.mark.parametrize("fields", [{"sliding_window": 6}, {"sliding_window": None}, {"sliding_window": 5} | YARN])
def test_import_and_export_give_the_directory_back(tmp_path, fields):
    model = model_of("mistral", **fields)
    source = saved(tmp_path / "hf", model)
    import_hf(source, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    first, second = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    back, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"), torch.arange(40)[None]
    assert type(back) is type(model) and back.config.sliding_window == fields["sliding_window"]
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
    theirs, ours = (read_fields(json.loads((path / "config.json").read_text())) for path in (source, tmp_path / "out"))
    assert theirs == ours


def test_what_a_silent_config_means_is_what_transformers_assumes():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8}
    theirs, model = MistralConfig(**sizes), read_fields(sizes | {"model_type": "mistral"}).model
    names = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window")
    assert [getattr(model, name) for name in names] == [getattr(theirs, name) for name in names]
    assert model.windowed_layers == () and not model.qkv_bias


def test_kinds_of_layers_that_transformers_would_pass_over_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    with pytest.raises(ModelError, match="layer_types that differ"):
        read_fields(
            sizes | {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
        )
