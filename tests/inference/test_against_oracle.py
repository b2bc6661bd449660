"""The engine against the float64 oracle, which shares no code with it: tokens, log probabilities, and what the store holds."""

import itertools

import pytest
import torch

from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams, score
from tests.hf.tiny import random_ids
from tests.inference.oracle_models import model_of, yarn
from tests.oracles.parallel_dmtd import (
    FOUR_VARIANTS,
    CycledDecoder,
    Shape,
    cycled_decode,
    random_weights,
    teacher_forced_logits,
    vanilla_logits,
)

SHAPES = {
    "qwen3": Shape(num_layers=4, num_parallel_layers=2),
    "llama": Shape(
        num_layers=3, num_parallel_layers=1, qk_norm=False, tie_word_embeddings=False, cycle_length=3, mask_token_id=60
    ),
    "qwen2, some layers windowed": Shape(
        num_layers=5, num_parallel_layers=3, qk_norm=False, qkv_bias=True, windows=(3, None, 3, 7, None)
    ),
    "biases, windows, yarn": Shape(
        num_parallel_layers=2, qkv_bias=True, output_bias=True, windows=(6,) * 4, cycle_length=3, mask_token_id=60, **yarn()
    ),
    "output bias only": Shape(num_layers=2, num_parallel_layers=1, output_bias=True, windows=(None, 1)),
}
VANILLA = {
    "mistral": Shape(num_layers=3, num_parallel_layers=0, qk_norm=False, windows=(5,) * 3),
    "mixed, yarn": Shape(num_layers=4, num_parallel_layers=0, qkv_bias=True, windows=(4, None, 9, None), **yarn()),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_kind = pytest.mark.parametrize(("history", "block_attention"), FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])


def engine_of(shape: Shape, weights, history: str, block_attention: str, *, dtype=torch.float64, **settings) -> Engine:
    model = model_of(shape, weights, history, block_attention, dtype=dtype)
    return Engine(model, EngineConfig(**{"max_batch": 3, "page_size": 12, "chunk_tokens": 10, **settings}))


def oracle_tokens(shape: Shape, weights, history: str, block_attention: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens with each token forbidden that has come before, so that random models do not repeat themselves."""
    decoder = CycledDecoder(weights, shape, history=history, block_attention=block_attention)
    tokens = list(prompt)
    logits_V = torch.stack([decoder.feed(token) for token in prompt])[-1]
    for _ in range(count):
        tokens.append(int(_penalised(logits_V, tokens).argmax()))
        logits_V = decoder.feed(tokens[-1])
    return tokens[len(prompt) :]


def _penalised(logits_V: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    penalised_V = torch.where(logits_V < 0, logits_V * 1e6, logits_V / 1e6)
    return penalised_V.where(torch.isin(torch.arange(len(logits_V)), torch.tensor(tokens)), logits_V)


@each_shape
@each_kind
@pytest.mark.parametrize("cuda_graphs", ["off", "shapes"])
def test_tokens_are_the_oracles(shape, history, block_attention, cuda_graphs):
    weights = random_weights(shape, seed=3)
    engine = engine_of(shape, weights, history, block_attention, cuda_graphs=cuda_graphs)
    prompts = [random_ids(length, seed=length).tolist() for length in (1, 3, 4, 7, 11)]
    params = SamplingParams(ignore_eos=True, repetition_penalty=1e6)
    completions = engine.generate(prompts, max_new_tokens=12, params=params)
    expected = [oracle_tokens(shape, weights, history, block_attention, prompt, 12) for prompt in prompts]
    assert min(len(set(tokens)) for tokens in expected) == 12
    assert [list(completion.token_ids) for completion in completions] == expected
    engine.check_integrity()


@each_shape
@each_kind
def test_log_probabilities_are_the_oracles(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    ids = random_ids(23, seed=9)
    expected = teacher_forced_logits(weights, shape, history=history, block_attention=block_attention, token_ids=ids.tolist())
    expected = expected[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    for chunk_tokens in (1, 6, 64):
        engine = engine_of(shape, weights, history, block_attention, chunk_tokens=chunk_tokens)
        scores = torch.tensor(score(engine, ids.tolist()), dtype=torch.float64)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", VANILLA.values(), ids=VANILLA)
@pytest.mark.parametrize("cuda_graphs", ["off", "shapes"])
def test_ordinary_decoders_of_any_parts_are_the_oracles(shape, cuda_graphs):
    weights, prompt = random_weights(shape, seed=3), random_ids(9, seed=2).tolist()
    engine = engine_of(shape, weights, "", "", cuda_graphs=cuda_graphs)
    params = SamplingParams(ignore_eos=True, repetition_penalty=1e6)
    (completion,) = engine.generate([prompt], max_new_tokens=20, params=params)
    tokens = list(prompt)
    for _ in range(20):
        tokens.append(int(_penalised(vanilla_logits(weights, shape, tokens)[-1], tokens).argmax()))
    assert list(completion.token_ids) == tokens[9:]
    expected = vanilla_logits(weights, shape, tokens)[:-1].log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(score(engine, tokens), dtype=torch.float64), expected, rtol=0, atol=1e-11)


NATIVE = {"num_layers": 4, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 40}
NATIVE_SHAPES = {
    "qwen2, some layers windowed": Shape(**NATIVE, qk_norm=False, qkv_bias=True, windows=(18, None, None, 5)),
    "biases, windows, yarn": Shape(**NATIVE, qkv_bias=True, output_bias=True, windows=(21,) * 4, **yarn(head_dim=16)),
}


@pytest.mark.parametrize("shape", NATIVE_SHAPES.values(), ids=NATIVE_SHAPES)
@pytest.mark.parametrize("kind", [*FOUR_VARIANTS, ("", "")], ids=[*("-".join(kind) for kind in FOUR_VARIANTS), "vanilla"])
@pytest.mark.parametrize("matrix_dtype", [torch.float32, torch.bfloat16])
def test_native_kernels_give_the_oracles_log_probabilities(shape, kind, matrix_dtype):
    """One token at a time, over several pages, windows that begin inside one, and texts that were cut.

    Level: fp32 rounding of logits of a few units, through four layers.
    """
    shape = Shape(**{**_fields(shape), "num_parallel_layers": 2 if kind[0] else 0})
    weights = {name: tensor.to(matrix_dtype).double() for name, tensor in random_weights(shape, seed=3).items()}
    model = model_of(shape, weights, *kind, dtype=torch.float32, matrix_dtype=matrix_dtype)
    engine = Engine(model, EngineConfig(max_batch=2, chunk_tokens=1, kernels="native"))
    ids = random_ids(47, seed=9)
    if kind[0]:
        expected = teacher_forced_logits(weights, shape, history=kind[0], block_attention=kind[1], token_ids=ids.tolist())
    else:
        expected = vanilla_logits(weights, shape, ids.tolist())
    assert expected.std() > 1
    expected = expected[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    scores = torch.tensor(score(engine, ids.tolist()), dtype=torch.float64)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [*FOUR_VARIANTS, ("", "")], ids=[*("-".join(kind) for kind in FOUR_VARIANTS), "vanilla"])
def test_products_in_bfloat16_stay_near_the_oracles_log_probabilities(kind):
    """A prompt of 47 tokens in pieces of 24, whose products are rounded to bfloat16; the oracle computes in float64.

    Level: every product rounded to eight bits, through four layers: a tenth of the logits' spread, a fortieth on average.
    """
    shape = Shape(**NATIVE, num_parallel_layers=2 if kind[0] else 0)
    weights = {name: tensor.bfloat16().double() for name, tensor in random_weights(shape, seed=3).items()}
    model = model_of(shape, weights, *kind, dtype=torch.float32, matrix_dtype=torch.bfloat16)
    ids = random_ids(47, seed=9)
    if kind[0]:
        expected = teacher_forced_logits(weights, shape, history=kind[0], block_attention=kind[1], token_ids=ids.tolist())
    else:
        expected = vanilla_logits(weights, shape, ids.tolist())
    spread = expected.std()
    expected = expected[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    differences = {}
    for rounded in (False, True):
        config = EngineConfig(max_batch=2, chunk_tokens=24, kernels="native", bf16_products=rounded)
        scores = torch.tensor(score(Engine(model, config), ids.tolist()), dtype=torch.float64)
        differences[rounded] = (scores - expected).abs() / spread
    assert differences[False].max() < 1e-4
    assert 1e-4 < differences[True].mean() < 1 / 40 and differences[True].max() < 1 / 10


def _fields(shape: Shape) -> dict:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def places_of(engine: Engine, pass_name: str) -> list[tuple[str, int]]:
    """(group, place) of each visit of a pass, in order."""
    return [(visit.kv_group, visit.kv_place) for visit in engine.model.schedule.pass_visits(pass_name)]


@each_shape
@each_kind
def test_the_store_holds_the_oracles_keys_and_values(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    engine = engine_of(shape, weights, history, block_attention, max_batch=1)
    prompt = random_ids(17, seed=4).tolist()
    events = engine.stream(prompt, max_new_tokens=20, params=SamplingParams(ignore_eos=True))
    for _ in range(9):
        next(events)
    (sequence,) = engine.scheduler.running
    tokens = sequence.tokens[: sequence.num_taken]
    assert len(tokens) == 25
    trace = cycled_decode(weights, shape, history=history, block_attention=block_attention, token_ids=tokens, prompt_length=1)
    snapshot = trace.snapshots[-1]
    layers = itertools.chain(snapshot.parallel.values(), snapshot.sequential.values())
    places = places_of(engine, "parallel") + places_of(engine, "sequential")
    for (name, place), expected in zip(places, layers, strict=True):
        pages = engine.store.groups[name].places[place]
        keys, values = pages.read(torch.tensor([sequence.tables[name].pages]))
        length = engine.store.num_entries(25)[name]
        assert length == len(expected.positions)
        torch.testing.assert_close(keys[0].transpose(0, 1)[:length], expected.keys, rtol=0, atol=1e-11)
        torch.testing.assert_close(values[0].transpose(0, 1)[:length], expected.values, rtol=0, atol=1e-11)
