"""Directories of the `dmtdqwen3` family: other runtimes load ours, and ours loads theirs, which hold no code."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import ModelError
from megatron_dmtd.families import read_fields
from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM
from tests.support.hf_models import change_fields, random_hf_directory, save_tokenizer, small_model

#: what a runtime of the family reads from config.json, and of which types
FIELDS = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "hidden_act": str,
    "max_position_embeddings": int,
    "initializer_range": float,
    "rms_norm_eps": float,
    "use_cache": bool,
    "tie_word_embeddings": bool,
    "rope_parameters": dict,
    "attention_bias": bool,
    "use_sliding_window": bool,
    "attention_dropout": float,
    "pad_token_id": int,
    "eos_token_id": int,
    "num_parallel_layers": int,
    "num_sequential_layers": int,
    "mtp_horizon": int,
    "mask_token_id": int,
    "dmtd_history_mode": str,
    "dmtd_block_attention": str,
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_an_export_states_every_field_that_the_family_reads(tmp_path, variant):
    cycle = CycleConfig(variant=variant, num_parallel_layers=3, mask_token_id=2)
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    random_hf_directory(tmp_path / "hf", small_model(vocab_size=300), cycle=cycle, tokenizer_dir=tokenizer)
    import_hf(tmp_path / "hf", tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["model_type"] == "dmtdqwen3" and fields["architectures"] == ["DMTDQwen3ForCausalLM"]
    assert {name: type(fields.get(name)) for name in FIELDS} == FIELDS
    assert (fields["num_parallel_layers"], fields["num_sequential_layers"], fields["mtp_horizon"]) == (3, 1, 4)
    assert (fields["dmtd_history_mode"], fields["dmtd_block_attention"]) == VARIANTS[variant]
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0} and fields["rope_theta"] == 10000.0


def their_directory(tmp_path, variant, **changes):
    """As the family publishes: weights and a config.json without pointers to code, or fields that only we write."""
    cycle = CycleConfig(variant=variant, num_parallel_layers=2, mask_token_id=99)
    directory = random_hf_directory(tmp_path / "theirs", small_model(), cycle=cycle)
    for path in directory.glob("*.py"):
        path.unlink()
    (directory / "generation_config.json").unlink()
    theirs = {"auto_map": None, "qk_norm": None, "use_cache": None, "max_window_layers": 4, "layer_types": ["full_attention"] * 4}
    change_fields(directory, **theirs | {"bos_token_id": 1, "eos_token_id": [3, 4]} | changes)
    return directory


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_directory_of_the_family_loads_and_imports(tmp_path, variant):
    theirs = their_directory(tmp_path, variant)
    model = AutoModelForCausalLM.from_pretrained(theirs)
    assert type(model) is DMTDQwen3ForCausalLM and model.config.qk_norm and model.config.eos_token_id == [3, 4]
    assert (model.config.dmtd_history_mode, model.config.dmtd_block_attention) == VARIANTS[variant]
    assert import_hf(theirs, tmp_path / "start").cycle.variant == variant
    export_hf(tmp_path / "start", tmp_path / "out")
    ours, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(3, 16)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, model(ids).logits)


def test_older_directories_that_name_no_variant_are_causal_norefresh(tmp_path):
    theirs = their_directory(tmp_path, "causal-norefresh", dmtd_history_mode=None, dmtd_block_attention=None)
    assert import_hf(theirs, tmp_path / "start").cycle.variant == "causal-norefresh"
    config = AutoModelForCausalLM.from_pretrained(theirs).config
    assert (config.dmtd_history_mode, config.dmtd_block_attention) == ("shadow", "causal")


def test_fields_that_are_left_out_mean_what_they_mean_in_the_family():
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    split = {"mtp_horizon": 4, "num_parallel_layers": 28, "num_sequential_layers": 8, "mask_token_id": 151660}
    fields = {"model_type": "dmtdqwen3", "vocab_size": 151936} | sizes | split
    description = read_fields(fields)
    model, cycle = description.model, description.cycle
    config = DMTDQwen3Config(**fields)
    assert (model.num_key_value_heads, model.head_dim, model.max_position_embeddings, model.qk_norm) == (8, 128, 40960, True)
    assert model.tie_word_embeddings and model.rope_theta == 1e6 and cycle.variant == "causal-norefresh"
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(model, name)
    assert config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dmtd_block_attention": "none"}, "dmtd_block_attention 'none'"),
        ({"num_thinking_layers": 2, "num_decoding_layers": 2}, "num_thinking_layers"),
        ({"num_encoding_layers": 1}, "num_encoding_layers"),
    ],
)
def test_dmtd_without_look_ahead_is_refused_by_name(tmp_path, changes, named):
    theirs = their_directory(tmp_path, "causal-refresh", **changes)
    with pytest.raises(ModelError) as caught:
        import_hf(theirs, tmp_path / "start")
    assert named in caught.value.found
    with pytest.raises(ValueError, match=named.split()[0]):
        AutoModelForCausalLM.from_pretrained(theirs)
