from dataclasses import replace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_dmtd.architecture import decoder_tensors, num_parameters
from megatron_dmtd.architecture.tensors import num_layer_parameters
from tests.architecture.decoders import LAYER, decoder

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
BIASED = replace(LAYER, attention=replace(LAYER.attention, qkv_bias=True, qk_norm=None))


def shapes_in(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in model.parameters())


def test_the_tensors_are_those_of_the_models_in_transformers():
    with torch.device("meta"):
        qwen3 = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))
        qwen2 = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    assert sorted(shape.shape for shape in decoder_tensors(decoder()).values()) == shapes_in(qwen3)
    biased = decoder(layers=(BIASED,) * 4)
    assert sorted(shape.shape for shape in decoder_tensors(biased).values()) == shapes_in(qwen2)
    assert num_parameters(biased) == qwen2.num_parameters()


def test_an_untied_head_is_a_tensor_of_its_own():
    tied, untied = decoder(), decoder(tie_word_embeddings=False)
    assert decoder_tensors(untied).keys() - decoder_tensors(tied).keys() == {"head.weight"}
    assert num_parameters(untied) - num_parameters(tied) == 100 * 32


def test_a_layer_is_shared_out_over_tensor_parallel_ranks_but_for_norms_and_the_output_bias():
    layer = replace(BIASED, attention=replace(BIASED.attention, output_bias=True))
    whole, half = (num_layer_parameters(layer, 32, tensor_parallel=ranks) for ranks in (1, 2))
    norms_and_output_bias = 2 * 32 + 32
    assert whole - norms_and_output_bias == 2 * (half - norms_and_output_bias)
