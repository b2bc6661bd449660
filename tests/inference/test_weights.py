"""Fused weights, their types, and updates in place."""

import pytest
import torch

from megatron_dmtd.architecture import decoder_tensors, make_schedule
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.families import hf_name
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from megatron_dmtd.inference.weights import build_model
from tests.inference.oracle_models import decoder_of, method_of, model_of
from tests.oracles.parallel_dmtd import Shape, random_weights

SHAPE = Shape(num_parallel_layers=2, qkv_bias=True, output_bias=True, windows=(5, None, 5, None))
KIND = ("real", "bidirectional")
TIED = {"tied": SHAPE, "untied": Shape(num_parallel_layers=2, tie_word_embeddings=False, head_dim=16, hidden_size=48)}
PROMPT = [5, 9, 2, 44, 17, 3, 8]


def addresses(model) -> list[int]:
    tensors = [model.embedding_VX, model.final_norm.weight, model.head.weight]
    for layer in model.layers:
        tensors += [linear.weight for linear in layer.linears]
        tensors += [linear.bias for linear in layer.linears if linear.bias is not None]
        tensors += [norm.weight for norm in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if norm]
    return [tensor.data_ptr() for tensor in tensors]


def test_parts_of_one_matrix_lie_one_below_the_other_and_biases_with_them():
    weights = random_weights(SHAPE, seed=1)
    layer = model_of(SHAPE, weights, *KIND).layers[3]
    prefix = "model.layers.3.self_attn."
    for kind in ("weight", "bias"):
        assert torch.equal(getattr(layer.qkv, kind), torch.cat([weights[f"{prefix}{name}_proj.{kind}"] for name in "qkv"]))
        assert torch.equal(getattr(layer.o, kind), weights[f"{prefix}o_proj.{kind}"])
    assert layer.gate_up.bias is None and layer.down.bias is None
    assert (layer.qkv.in_features, layer.qkv.out_features) == (32, 64)


def test_matrices_and_vectors_have_their_types_and_weigh_what_they_weigh():
    model = model_of(SHAPE, random_weights(SHAPE, seed=1), *KIND, dtype=torch.float32, matrix_dtype=torch.bfloat16)
    layer = model.layers[0]
    assert layer.qkv.weight.dtype == model.embedding_VX.dtype == torch.bfloat16
    assert layer.qkv.bias.dtype == layer.q_norm.weight.dtype == model.dtype == torch.float32
    assert layer.qkv.num_bytes == 64 * 32 * 2 + 64 * 4


def test_the_caller_keeps_its_tensors():
    weights = random_weights(SHAPE, seed=1)
    model = model_of(SHAPE, weights, *KIND)
    before = weights["model.norm.weight"].clone()
    model.final_norm.weight.zero_()
    assert torch.equal(weights["model.norm.weight"], before)


@pytest.mark.parametrize("shape", TIED.values(), ids=TIED)
@pytest.mark.parametrize("settings", [{"kernels": "native"}, {"kernels": "torch"}, {"kernels": "torch", "cuda_graphs": "shapes"}])
def test_an_engine_whose_weights_are_overwritten_computes_with_the_new_ones(shape, settings):
    if settings["kernels"] == "native" and shape.head_dim % 16:
        shape = Shape(**{**{name: getattr(shape, name) for name in shape.__dataclass_fields__}, "head_dim": 16})
    old, new = random_weights(shape, seed=1), random_weights(shape, seed=2)
    config = EngineConfig(max_batch=2, prefix_caching=False, **settings)
    params = SamplingParams(ignore_eos=True, repetition_penalty=5.0)

    def tokens(engine) -> list[int]:
        return [list(item.token_ids) for item in engine.generate([PROMPT, PROMPT[2:]], max_new_tokens=12, params=params)]

    engine = Engine(model_of(shape, old, *KIND, dtype=torch.float32), config)
    fresh = Engine(model_of(shape, new, *KIND, dtype=torch.float32), config)
    before, places = tokens(engine), addresses(engine.model)
    assert before != tokens(fresh)
    engine.model.update(lambda name: new[hf_name(name, engine.model.schedule.decoder)])
    assert addresses(engine.model) == places
    assert tokens(engine) == tokens(fresh)


def test_every_tensor_is_asked_for_once():
    schedule = make_schedule(decoder_of(SHAPE), method_of(SHAPE, *KIND))
    weights, asked = random_weights(SHAPE, seed=1), []
    model = build_model(schedule, lambda name: asked.append(name) or weights[hf_name(name, schedule.decoder)])
    assert sorted(asked) == sorted(decoder_tensors(schedule.decoder)) == sorted(model.places)


def test_a_tensor_of_another_shape_is_refused_by_name():
    weights = random_weights(SHAPE, seed=1)
    model = model_of(SHAPE, weights, *KIND)
    narrow = weights | {"model.layers.2.mlp.up_proj.weight": torch.ones(47, 32)}
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up\.weight of shape \[47, 32\]"):
        model.update(lambda name: narrow[hf_name(name, model.schedule.decoder)])
