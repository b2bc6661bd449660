import itertools

import pytest
import torch

from megatron_dmtd.architecture import DecoderSpec
from megatron_dmtd.config import ModelConfig
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.weights.megatron_names import check_hf, from_hf, rules, to_hf
from megatron_dmtd.weights.specs import spec_of


def decoder(**changes) -> DecoderSpec:
    shape = {
        "num_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 100,
    }
    return decoder_of(ModelConfig(**(shape | changes)))


def hf_tensors(model: DecoderSpec, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for rule in rules(model) for name, shape in rule.hf}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)


CASES = list(itertools.product([torch.float32, torch.bfloat16], [True, False], [True, False]))


@pytest.mark.parametrize(("dtype", "tied", "qk_norm"), CASES)
def test_there_and_back_is_bitwise(dtype, tied, qk_norm):
    model = decoder(tie_word_embeddings=tied, qk_norm=qk_norm)
    hf = hf_tensors(model, dtype)
    megatron = from_hf(model, hf)
    back = to_hf(model, megatron)
    assert list(back) == list(hf)
    assert all(same_bits(back[name], hf[name]) for name in hf)
    again = from_hf(model, back)
    assert all(same_bits(again[name], megatron[name]) for name in megatron)


def test_names_on_this_side_are_those_of_megatron():
    names = {rule.megatron_name: rule.megatron_shapes[0] for rule in rules(decoder(num_layers=1, tie_word_embeddings=False))}
    assert names == {
        "embedding.word_embeddings.weight": (128, 8),
        "decoder.layers.0.input_layernorm.weight": (8,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (48, 8),
        "decoder.layers.0.self_attention.q_layernorm.weight": (6,),
        "decoder.layers.0.self_attention.k_layernorm.weight": (6,),
        "decoder.layers.0.self_attention.linear_proj.weight": (8, 24),
        "decoder.layers.0.pre_mlp_layernorm.weight": (8,),
        "decoder.layers.0.mlp.linear_fc1.weight": (24, 8),
        "decoder.layers.0.mlp.linear_fc2.weight": (8, 12),
        "decoder.final_layernorm.weight": (8,),
        "output_layer.weight": (128, 8),
    }


def test_foreign_names_are_those_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    for qk_norm, theirs in ((True, Qwen3ForCausalLM(Qwen3Config(**sizes))), (False, LlamaForCausalLM(LlamaConfig(**sizes)))):
        model = decoder(qk_norm=qk_norm, tie_word_embeddings=False)
        check_hf(model, {name: spec_of(tensor) for name, tensor in theirs.state_dict().items()})


def test_each_group_of_query_heads_stands_with_its_key_and_value():
    # 4 query heads, 2 groups, head width 2, one column: rows are numbered by what they are
    model = decoder(num_layers=1, hidden_size=1, head_dim=2, qk_norm=False)
    hf = hf_tensors(model)
    prefix = "model.layers.0.self_attn"
    hf[f"{prefix}.q_proj.weight"] = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    hf[f"{prefix}.k_proj.weight"] = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
    hf[f"{prefix}.v_proj.weight"] = torch.tensor([[20.0], [21.0], [22.0], [23.0]])
    megatron = from_hf(model, hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert megatron.flatten().tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def test_gate_comes_before_up():
    model = decoder(num_layers=1)
    hf = hf_tensors(model)
    megatron = from_hf(model, hf)["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(megatron[:12], hf["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(megatron[12:], hf["model.layers.0.mlp.up_proj.weight"])


def test_padded_rows_are_zero_and_cut_off_again():
    model = decoder(tie_word_embeddings=False)
    megatron = from_hf(model, hf_tensors(model))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert megatron[name].shape == (128, 8)
        assert not megatron[name][100:].any() and megatron[name][:100].any()
        megatron[name][100:] = 7.0
    assert to_hf(model, megatron)["lm_head.weight"].shape == (100, 8)


def test_an_unpadded_table_is_accepted_on_the_way_out():
    model = decoder()
    hf = hf_tensors(model)
    megatron = from_hf(model, hf)
    megatron["embedding.word_embeddings.weight"] = megatron["embedding.word_embeddings.weight"][:100]
    assert torch.equal(to_hf(model, megatron)["model.embed_tokens.weight"], hf["model.embed_tokens.weight"])


def test_all_faults_of_an_import_are_in_one_error():
    model = decoder()
    hf = hf_tensors(model)
    del hf["model.norm.weight"]
    hf["model.layers.2.input_layernorm.weight"] = torch.zeros(8)
    hf["model.layers.0.mlp.down_proj.weight"] = torch.zeros(8, 11)
    hf["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(8, 24, dtype=torch.int8)
    hf["model.layers.1.mlp.up_proj.weight"] = torch.zeros(12, 8, dtype=torch.bfloat16)
    with pytest.raises(ConversionError) as caught:
        from_hf(model, hf)
    first, *faults = caught.value.found.splitlines()
    assert first == "5 fault(s):"
    assert sorted(faults) == [
        "  missing: model.norm.weight [8]",
        "  unknown: model.layers.2.input_layernorm.weight [8]",
        "  wrong shape: model.layers.0.mlp.down_proj.weight is [8, 11], not [8, 12]",
        "  wrong type: model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight "
        "mix torch.bfloat16 and torch.float32",
        "  wrong type: model.layers.1.self_attn.o_proj.weight is torch.int8",
    ]


def test_all_faults_of_an_export_are_in_one_error():
    model = decoder()
    megatron = from_hf(model, hf_tensors(model))
    del megatron["decoder.layers.1.mlp.linear_fc2.weight"]
    megatron["output_layer.weight"] = torch.zeros(128, 8)
    megatron["embedding.word_embeddings.weight"] = torch.zeros(112, 8)
    with pytest.raises(ConversionError) as caught:
        to_hf(model, megatron)
    assert caught.value.found.splitlines() == [
        "3 fault(s):",
        "  missing: decoder.layers.1.mlp.linear_fc2.weight [8, 12]",
        "  wrong shape: embedding.word_embeddings.weight is [112, 8], not [128, 8] or [100, 8]",
        "  unknown: output_layer.weight [128, 8]",
    ]


def test_q_and_k_norms_are_neither_dropped_nor_invented():
    with_norm, without = decoder(), decoder(qk_norm=False)
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.0\.self_attn\.q_norm\.weight"):
        from_hf(without, hf_tensors(with_norm))
    with pytest.raises(ConversionError, match=r"missing: model\.layers\.1\.self_attn\.k_norm\.weight"):
        from_hf(with_norm, hf_tensors(without))


def test_a_tied_head_may_be_stored_twice_but_not_differ():
    model = decoder()
    hf = hf_tensors(model)
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    assert "output_layer.weight" not in from_hf(model, hf)
    hf["lm_head.weight"][99, 7] += 1
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs"):
        from_hf(model, hf)
