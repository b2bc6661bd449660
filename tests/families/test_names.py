import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_dmtd.families import hf_tensors, read_fields

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_names_and_shapes_are_those_of_transformers():
    for config, model_class in (
        (
            Qwen3Config(**SIZES, head_dim=8, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True),
            Qwen3ForCausalLM,
        ),
        (LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False), LlamaForCausalLM),
    ):
        with torch.device("meta"):
            theirs = {name: tuple(tensor.shape) for name, tensor in model_class(config).named_parameters()}
        ours = hf_tensors(read_fields(config.to_dict()).decoder)
        assert {name: tensor.shape for name, tensor in ours.items()} == theirs
