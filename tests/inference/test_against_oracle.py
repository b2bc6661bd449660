"""The engine against the float64 oracle, which shares no code with it: tokens, log probabilities, and what the pools hold."""

import pytest
import torch

from megatron_dmtd.hf import DMTDQwen3Config
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams, score
from megatron_dmtd.inference.weights import build_model
from tests.hf.tiny import random_ids
from tests.oracles.parallel_dmtd import FOUR_VARIANTS, CycledDecoder, Shape, cycled_decode, random_weights, teacher_forced_logits

SHAPES = {
    "qwen3": Shape(num_layers=4, num_parallel_layers=2),
    "llama": Shape(
        num_layers=3, num_parallel_layers=1, qk_norm=False, tie_word_embeddings=False, cycle_length=3, mask_token_id=60
    ),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_kind = pytest.mark.parametrize(("history", "block_attention"), FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])


def engine_of(shape: Shape, weights, history: str, block_attention: str, **settings) -> Engine:
    config = DMTDQwen3Config(
        mtp_horizon=shape.cycle_length,
        num_parallel_layers=shape.num_parallel_layers,
        num_sequential_layers=shape.num_layers - shape.num_parallel_layers,
        mask_token_id=shape.mask_token_id,
        dmtd_history_mode=history,
        dmtd_block_attention=block_attention,
        qk_norm=shape.qk_norm,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=96,
    )
    model = build_model(config, weights.__getitem__)
    return Engine(model, EngineConfig(**{"max_batch": 3, "page_size": 12, "chunk_tokens": 10, **settings}))


def oracle_tokens(shape: Shape, weights, history: str, block_attention: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens with each token forbidden that has come before, so that random models do not repeat themselves."""
    decoder = CycledDecoder(weights, shape, history=history, block_attention=block_attention)
    tokens = list(prompt)
    logits_V = torch.stack([decoder.feed(token) for token in prompt])[-1]
    for _ in range(count):
        logits_V = torch.where(logits_V < 0, logits_V * 1e6, logits_V / 1e6).where(
            torch.isin(torch.arange(len(logits_V)), torch.tensor(tokens)), logits_V
        )
        tokens.append(int(logits_V.argmax()))
        logits_V = decoder.feed(tokens[-1])
    return tokens[len(prompt) :]


@each_shape
@each_kind
def test_tokens_are_the_oracles(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    engine = engine_of(shape, weights, history, block_attention)
    prompts = [random_ids(length, seed=length).tolist() for length in (1, 3, 4, 7, 11)]
    params = SamplingParams(ignore_eos=True, repetition_penalty=1e6)
    completions = engine.generate(prompts, max_new_tokens=12, params=params)
    expected = [oracle_tokens(shape, weights, history, block_attention, prompt, 12) for prompt in prompts]
    assert min(len(set(tokens)) for tokens in expected) == 12
    assert [list(completion.token_ids) for completion in completions] == expected


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


@each_shape
@each_kind
def test_pools_hold_the_oracles_keys_and_values(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    engine = engine_of(shape, weights, history, block_attention, max_batch=1)
    prompt = random_ids(17, seed=4).tolist()
    events = engine.stream(prompt, max_new_tokens=20, params=SamplingParams(ignore_eos=True))
    for _ in range(9):
        next(events)
    (sequence,) = engine.scheduler.running
    taken = sequence.tokens[: sequence.num_taken]
    assert len(taken) == 25
    trace = cycled_decode(weights, shape, history=history, block_attention=block_attention, token_ids=taken, prompt_length=1)
    snapshot = trace.snapshots[-1]
    for pool, table, layers in (
        (engine.pools.parallel, sequence.tables.parallel, snapshot.parallel),
        (engine.pools.sequential, sequence.tables.sequential, snapshot.sequential),
    ):
        for index, expected in enumerate(layers.values()):
            length = len(expected.positions)
            keys = pool.k_LNGET[index, table.pages].permute(0, 3, 1, 2).flatten(0, 1)[:length]
            values = pool.v_LNGTE[index, table.pages].permute(0, 2, 1, 3).flatten(0, 1)[:length]
            torch.testing.assert_close(keys, expected.keys, rtol=0, atol=1e-11)
            torch.testing.assert_close(values, expected.values, rtol=0, atol=1e-11)
    assert engine.method.parallel_entries(25) == len(snapshot.parallel[0].positions)
