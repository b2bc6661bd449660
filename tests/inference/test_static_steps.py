"""Decoding in shapes that repeat, and from CUDA graphs of them, against decoding as it comes."""

import dataclasses

import pytest
import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from tests.hf.tiny import random_ids
from tests.inference.models import KINDS, PENALTY, Pair

CONFIG = EngineConfig(max_batch=5, max_length=128, cache_tokens=640, chunk_tokens=24, kernels="torch", cuda_graphs="shapes")
GREEDY = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
PROMPTS = [random_ids(length, seed=300 + length).tolist() for length in (1, 6, 33, 16, 47, 2, 9)]


def recorded_logits(engine: Engine) -> list[torch.Tensor]:
    """Logits of every step to come."""
    seen, run = [], engine.runner.run
    engine.runner.run = lambda plan, wanted: seen.append(run(plan, wanted).clone()) or seen[-1]
    return seen


@pytest.mark.parametrize("align_heads", [True, False])
def test_padded_steps_give_the_logits_and_tokens_of_steps_as_they_come(pair: Pair, align_heads):
    config = dataclasses.replace(CONFIG, align_heads=align_heads)
    static, dynamic = pair.engine(config), pair.engine(dataclasses.replace(config, cuda_graphs="off"))
    logits = recorded_logits(static), recorded_logits(dynamic)
    completions = [engine.generate(PROMPTS, max_new_tokens=15, params=GREEDY) for engine in (static, dynamic)]
    assert completions[0] == completions[1]
    assert [list(completion.token_ids) for completion in completions[0]] == [pair.greedy(prompt, 15) for prompt in PROMPTS]
    assert len(logits[0]) == len(logits[1])
    for one, other in zip(*logits):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert static.runner.static.num_steps > 20
    assert dynamic.runner.static is None
    static.check_integrity()


def test_few_shapes_serve_many_steps_and_rows_of_nobody_leave_no_trace(pair: Pair):
    engine = pair.engine(dataclasses.replace(CONFIG, prefix_caching=False))
    assert [list(item.token_ids) for item in engine.generate(PROMPTS[:3], max_new_tokens=40, params=GREEDY)] == [
        pair.greedy(prompt, 40) for prompt in PROMPTS[:3]
    ]
    passes = 1 if pair.kind == "vanilla" else 2
    # up to 1, 2 or 4 requests, of up to 1, 2, 4 or 8 pages
    assert passes <= engine.runner.static.num_programs <= passes * 12
    assert engine.runner.static.num_steps >= 39
    for group in engine.store.groups.values():
        for place in group.places:
            assert len(place.k_PGDT) == group.pages.num_pages + 6
            assert torch.isfinite(place.k_PGDT).all() and torch.isfinite(place.v_PGTD).all()


def test_shadow_keys_and_values_of_refresh_are_in_scratch_pages_only(pairs):
    engine = pairs["bidirectional-refresh"].engine(dataclasses.replace(CONFIG, prefix_caching=False))
    events = engine.stream(PROMPTS[1], max_new_tokens=30, params=GREEDY)
    for _ in range(8):
        next(events)
    group = engine.store.groups["parallel"]
    k_LPGDT = torch.stack([place.k_PGDT for place in group.places])
    (sequence,) = engine.scheduler.running
    assert sequence.num_taken == 13
    held = k_LPGDT[:, : group.pages.num_pages].abs().sum(dim=(0, 2, 3))  # by page and entry
    (page,) = sequence.tables["parallel"].pages
    assert held[page].nonzero()[:, 0].tolist() == list(range(12))
    assert held.count_nonzero() == 12
    scratch = k_LPGDT[:, group.pages.num_pages + sequence.slot].abs().sum(dim=(0, 1, 2))
    assert scratch.nonzero()[:, 0].tolist() == [0, 1, 2, 3]


def test_preempted_and_resumed_requests_give_the_same_tokens_in_padded_steps(pair: Pair):
    config = dataclasses.replace(CONFIG, max_batch=4, max_length=64, cache_tokens=96, chunk_tokens=16)
    engine = pair.engine(config)
    prompts = [random_ids(length, seed=length).tolist() for length in (10, 13, 7, 15)]
    completions = engine.generate(prompts, max_new_tokens=30, params=GREEDY)
    assert [list(completion.token_ids) for completion in completions] == [pair.greedy(prompt, 30) for prompt in prompts]
    assert engine.stats.num_preemptions > 0 and engine.runner.static.num_steps > 20
    engine.check_integrity()


def test_graphs_are_refused_where_there_are_none(pairs):
    with pytest.raises(CapabilityError, match="CUDA graphs on cpu"):
        pairs["vanilla"].engine(dataclasses.replace(CONFIG, cuda_graphs="on"))
    with pytest.raises(ConfigError, match="cuda_graphs='maybe'"):
        pairs["vanilla"].engine(dataclasses.replace(CONFIG, cuda_graphs="maybe"))
    assert pairs["vanilla"].engine(dataclasses.replace(CONFIG, cuda_graphs="auto")).runner.static is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_tokens_and_logits_of_the_plain_path_on_a_gpu(pairs, kind):
    pair = pairs[kind]
    config = dataclasses.replace(CONFIG, cuda_graphs="auto")
    graphs = pair.engine(config, device="cuda")
    plain = pair.engine(dataclasses.replace(config, cuda_graphs="off"), device="cuda")
    logits = recorded_logits(graphs), recorded_logits(plain)
    for _ in range(2):  # the second time everything is replayed
        for engine in (graphs, plain):
            completions = engine.generate(PROMPTS, max_new_tokens=30, params=GREEDY)
            tokens = [list(completion.token_ids) for completion in completions]
            assert tokens == [pair.greedy(prompt, 30) for prompt in PROMPTS]
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert graphs.runner.static.num_steps > graphs.runner.static.num_programs > 0
    assert plain.runner.static is None
    graphs.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_in_bfloat16_stay_near_the_plain_path_on_a_gpu(pairs, kind):
    params = dataclasses.replace(GREEDY, logprobs=1)
    results = []
    for cuda_graphs in ("on", "off"):
        config = dataclasses.replace(CONFIG, cuda_graphs=cuda_graphs)
        engine = pairs[kind].engine(config, device="cuda", dtype="bfloat16")
        (completion,) = engine.generate([PROMPTS[2]], max_new_tokens=8, params=params)
        results.append(completion)
    graphs, plain = (torch.tensor([choice.logprob for choice in result.logprobs[:1]]) for result in results)
    torch.testing.assert_close(graphs, plain, rtol=0, atol=0.1)
