"""Directories that are ours, and those that are not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_dmtd.errors import CheckpointError, ConversionError, DMTDError, ModelError
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams, score
from megatron_dmtd.inference.loading import load_model
from tests.families.dory_directories import DIALECTS, save_dory, tensors
from tests.hf.tiny import random_ids, tiny_model, vanilla_decoder
from tests.inference.models import PENALTY, SMALL, Pair

CPU = torch.device("cpu")
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture
def copy(pairs, tmp_path):
    return shutil.copytree(pairs["causal-refresh"].directory, tmp_path / "copy")


def change_config(folder, *, without: tuple[str, ...] = (), **fields) -> None:
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(kept | fields))


def change_weights(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_fused_matrices_are_those_of_the_directory(pairs):
    pair = pairs["causal-refresh"]
    model, weights = load_model(pair.directory, device=CPU, dtype=torch.float64), pair.slow.state_dict()
    assert len(model.layers) == 4 and model.method.num_parallel_layers == 2
    prefix = "model.layers.3."
    expected = torch.cat([weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(model.layers[3].qkv.weight, expected)
    assert torch.equal(model.layers[3].gate_up.weight[48:], weights[prefix + "mlp.up_proj.weight"])
    assert model.method.variant == "causal-refresh" and model.method.mask_token_id == 60
    assert torch.equal(model.head.weight, weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bidirectional-refresh", {"qk_norm": False, "tie_word_embeddings": True}),
        ("vanilla", {"qk_norm": False}),
        ("causal-norefresh", {"attention_bias": True, "num_key_value_heads": 4}),
        ("bidirectional-norefresh", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("causal-refresh", {"mtp_horizon": 3, "num_parallel_layers": 1, "num_sequential_layers": 3}),
        ("bidirectional-refresh", WINDOWS | {"attention_bias": True, "attention_output_bias": False}),
        ("causal-norefresh", WINDOWS | {"layer_types": ["sliding_attention"] * 4, "qk_norm": False}),
        ("vanilla", WINDOWS),
        ("vanilla", {"rope_parameters": LLAMA3, "qk_norm": False}),
        ("causal-refresh", {"rope_parameters": LLAMA3}),
        ("bidirectional-norefresh", {"rope_parameters": YARN}),
    ],
)
def test_every_kind_of_decoder_gives_the_tokens_of_generate(tmp_path, kind, changes):
    pair = Pair(tmp_path, kind, **changes)
    engine = pair.engine(EngineConfig(max_batch=2, max_length=64, cache_tokens=192, page_size=12))
    prompts = [[5, 9, 2, 44, 17], [3, 8]]
    params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
    completions = engine.generate(prompts, max_new_tokens=11, params=params)
    assert [list(completion.token_ids) for completion in completions] == [pair.greedy(prompt, 11) for prompt in prompts]


def test_a_dmtd_model_decodes_as_vanilla_on_request(pairs):
    engine = pairs["bidirectional-norefresh"].engine(variant="vanilla")
    params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
    (completion,) = engine.generate([[7, 3, 20]], max_new_tokens=9, params=params)
    assert list(completion.token_ids) == pairs["vanilla"].greedy([7, 3, 20], 9)
    assert engine.stats.num_parallel_passes == 0


def test_the_directorys_stop_tokens_end_an_output(pairs, copy):
    expected = pairs["causal-refresh"].greedy([7, 3, 20], 9, repetition_penalty=1.0)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [expected[4], expected[4]]}))
    engine = Engine(copy, SMALL, dtype="float64", device="cpu")
    (completion,) = engine.generate([[7, 3, 20]], max_new_tokens=9)
    assert list(completion.token_ids) == expected[: expected.index(expected[4]) + 1]
    assert completion.finish_reason == "stop"
    change_config(copy, eos_token_id=expected[0])
    (copy / "generation_config.json").unlink()
    assert load_model(copy, device=CPU).stop_token_ids == (expected[0],)


def test_directories_that_are_not_models_are_refused_by_name(tmp_path, copy):
    with pytest.raises(CheckpointError, match="no directory"):
        Engine(tmp_path / "absent")
    change_config(copy, model_type="gpt2")
    with pytest.raises(ModelError, match="model_type 'gpt2'"):
        Engine(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        Engine(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        Engine(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": 99}, "mask_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"hidden_size": 64}, "wrong shape"),
    ],
)
def test_configurations_that_cannot_be_decoded_are_refused(copy, fields, message):
    change_config(copy, **fields)
    with pytest.raises(DMTDError, match=message):
        Engine(copy, device="cpu")


def test_what_transformers_takes_for_the_end_of_a_text_is_taken_where_a_directory_is_silent(tmp_path):
    source = tiny_model("causal-refresh", qk_norm=False)
    for name, expected in (("llama", (2,)), ("dmtd", ())):
        model = vanilla_decoder(source) if name == "llama" else source
        model.save_pretrained(tmp_path / name)
        change_config(tmp_path / name, without=("eos_token_id",))
        (tmp_path / name / "generation_config.json").unlink(missing_ok=True)
        assert load_model(tmp_path / name, device=CPU).stop_token_ids == expected


def test_weights_are_accounted_for(copy):
    change_weights(copy, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ConversionError, match=r"missing: model\.norm\.weight"):
        Engine(copy)
    change_weights(copy, lambda weights: weights.update({"model.norm.weight": torch.ones(32), "extra": torch.ones(1)}))
    with pytest.raises(ConversionError, match="unknown: extra"):
        Engine(copy)
    (copy / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConversionError, match="no safetensors header"):
        Engine(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="no safetensors in"):
        Engine(copy)


def test_a_tied_head_stored_twice_must_be_the_embedding_table(tmp_path):
    pair = Pair(tmp_path, "causal-norefresh", tie_word_embeddings=True)
    table = load_file(pair.directory / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(pair.directory, lambda weights: weights.update({"lm_head.weight": table.clone()}))
    model = load_model(pair.directory, device=CPU)
    assert model.head.weight is model.embedding_VX
    change_weights(pair.directory, lambda weights: weights.update({"lm_head.weight": table + 1}))
    with pytest.raises(ConversionError, match="differs from"):
        load_model(pair.directory, device=CPU)


FIELDS = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
ORDINARY_MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**FIELDS)),
    "qwen2, last layers windowed": lambda: Qwen2ForCausalLM(
        Qwen2Config(**FIELDS, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**FIELDS, sliding_window=21, head_dim=32)),
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**FIELDS, rope_parameters=LLAMA3)),
    "qwen3, yarn": lambda: Qwen3ForCausalLM(
        Qwen3Config(**FIELDS, head_dim=32, rope_parameters=YARN | {"original_max_position_embeddings": 32})
    ),
}


@pytest.mark.parametrize("name", ORDINARY_MODELS)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_ordinary_models_have_the_logits_of_transformers(tmp_path, name, kernels):
    """Level: fp32 rounding. Texts of several pages, one token at a time."""
    model = ORDINARY_MODELS[name]().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else noise * 2 / weight.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    ids = random_ids(1, 57, seed=2)
    with torch.no_grad():
        expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert expected.std() > 1
    engine = Engine(tmp_path, EngineConfig(max_batch=1, chunk_tokens=1, kernels=kernels), device="cpu")
    found = torch.tensor(score(engine, ids[0].tolist()))
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


# Dory.


def published_dory(directory, **changes):
    """transformers' model."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **changes).eval()


def scores_of_transformers(model, ids, piece: int | None = None) -> torch.Tensor:
    """Log probability of each token of `ids` [1, N] but the first, read in pieces of so many tokens."""
    cache, logits = None, []
    for begin in range(0, ids.shape[1], piece or ids.shape[1]):
        part = ids[:, begin : begin + (piece or ids.shape[1])]
        with torch.no_grad():
            mask = torch.ones(1, begin + part.shape[1], dtype=torch.long)
            output = model(part, attention_mask=mask, cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits)
    return torch.cat(logits, dim=1)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def dory_ids() -> torch.Tensor:
    return torch.randint(0, 100, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_dory_has_the_logits_of_transformers(tmp_path, dory_ids, num_loops, mode, kernels):
    """Level: 3e-5 in fp32. In `last_loop` the numbers depend on the pieces, so both read the same ones."""
    source = save_dory(tmp_path / "model")
    model = published_dory(source, n_recurrent_loops=num_loops, recurrent_kv_cache_mode=mode)
    for piece in (8, 3, 1):
        expected = scores_of_transformers(model, dory_ids, piece)
        assert expected.std() > 1
        config = EngineConfig(max_batch=2, kernels=kernels)
        engine = Engine(source, config, device="cpu", num_loops=num_loops, kv_mode=mode, prefill_chunk=piece)
        torch.testing.assert_close(torch.tensor(score(engine, dory_ids[0].tolist())), expected, rtol=1e-5, atol=3e-5)


def test_embedding_rows_that_are_not_of_norm_1_are_read_as_transformers_reads_them(tmp_path, dory_ids):
    source = save_dory(tmp_path / "model", weights=tensors(unit_rows=False))
    expected = scores_of_transformers(published_dory(source), dory_ids)
    found = score(Engine(source, EngineConfig(max_batch=1), device="cpu"), dory_ids[0].tolist())
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_dory_decodes_the_tokens_of_transformers(tmp_path, dory_ids, mode):
    source, prompt = save_dory(tmp_path / "model"), dory_ids[:, :9]
    model = published_dory(source, recurrent_kv_cache_mode=mode)
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)[0, 9:].tolist()
    engine = Engine(source, EngineConfig(max_batch=2), device="cpu", kv_mode=mode, prefill_chunk=9)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    assert list(engine.generate([prompt[0].tolist()], max_new_tokens=12, params=params)[0].token_ids) == expected


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_loads(tmp_path, dory_ids, dialect):
    engine = Engine(save_dory(tmp_path / "model", dialect=dialect), EngineConfig(max_batch=1), device="cpu")
    reference = Engine(save_dory(tmp_path / "both"), EngineConfig(max_batch=1), device="cpu")
    assert score(engine, dory_ids[0].tolist()) == score(reference, dory_ids[0].tolist())
