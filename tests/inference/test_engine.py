"""The engine against transformers' `generate` and against the oracle, token for token."""

import dataclasses
import random

import pytest

from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from tests.hf.tiny import random_ids
from tests.inference.models import PENALTY, Pair

GREEDY = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
PLAIN = SamplingParams(ignore_eos=True)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    return [random_ids(length, seed=seed + index).tolist() for index, length in enumerate(lengths)]


def outputs(engine: Engine, prompts: list[list[int]], max_new_tokens: int, params=GREEDY) -> list[list[int]]:
    completions = engine.generate(prompts, max_new_tokens=max_new_tokens, params=params)
    assert [completion.finish_reason for completion in completions] == ["length"] * len(prompts)
    engine.check_integrity()
    return [list(completion.token_ids) for completion in completions]


def test_single_requests_of_any_length_give_the_tokens_of_generate(pair: Pair):
    engine = pair.engine()
    prompts = prompts_of([1, 2, 3, 4, 5, 8, 15])
    expected = [pair.greedy(prompt, 13) for prompt in prompts]
    assert min(len(set(tokens)) for tokens in expected) > 8
    assert [outputs(engine, [prompt], 13)[0] for prompt in prompts] == expected
    plain = pair.greedy(prompts[3], 13, repetition_penalty=1.0)
    assert outputs(engine, [prompts[3]], 13, PLAIN) == [plain]


@pytest.mark.parametrize("align_heads", [True, False])
def test_batches_at_mixed_phases_give_the_tokens_of_each_request_alone(pair: Pair, align_heads):
    engine = pair.engine(EngineConfig(max_batch=3, max_length=128, cache_tokens=512, chunk_tokens=24, align_heads=align_heads))
    prompts = prompts_of([5, 1, 14, 9, 30, 2, 7, 4], seed=20)
    expected = [pair.greedy(prompt, 11) for prompt in prompts]
    assert outputs(engine, prompts, 11) == expected
    order = list(range(8))
    random.Random(1).shuffle(order)
    assert outputs(engine, [prompts[index] for index in order], 11) == [expected[index] for index in order]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 50])
def test_prompts_cut_anywhere_give_the_tokens_of_whole_ones(pair: Pair, chunk_tokens):
    engine = pair.engine(EngineConfig(max_batch=2, max_length=128, cache_tokens=512, chunk_tokens=chunk_tokens))
    prompts = prompts_of([37, 22, 5], seed=40)
    assert outputs(engine, prompts, 6) == [pair.greedy(prompt, 6) for prompt in prompts]


def test_length_caps_fall_anywhere_in_a_cycle(pair: Pair):
    engine = pair.engine()
    (prompt,) = prompts_of([6], seed=60)
    expected = pair.greedy(prompt, 9)
    for count in range(1, 10):
        assert outputs(engine, [prompt], count) == [expected[:count]]


def test_stop_tokens_fall_anywhere_in_a_cycle_and_end_the_output(pair: Pair):
    engine = pair.engine()
    (prompt,) = prompts_of([6], seed=60)
    expected = pair.greedy(prompt, 9)
    assert len(set(expected)) == 9
    for index, token in enumerate(expected):
        params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY, stop_token_ids=(token,))
        (completion,) = engine.generate([prompt], max_new_tokens=30, params=params)
        assert (list(completion.token_ids), completion.finish_reason) == (expected[: index + 1], "stop")
        engine.check_integrity()


def test_shared_prefixes_are_reused_and_change_no_token(pair: Pair):
    config = EngineConfig(max_batch=2, max_length=128, cache_tokens=512, chunk_tokens=64)
    engine, without = pair.engine(config), pair.engine(dataclasses.replace(config, prefix_caching=False))
    start = prompts_of([35], seed=70)[0]
    prompts = [start[:cut] + tail for cut, tail in zip((35, 35, 33, 32, 31, 16, 7), prompts_of([4, 9, 1, 3, 5, 2, 6], seed=80))]
    expected = [pair.greedy(prompt, 9) for prompt in prompts]
    for _ in range(2):
        assert [outputs(engine, [prompt], 9)[0] for prompt in prompts] == expected
    assert engine.prefix_index.num_reused_tokens > 32 * 8
    assert outputs(without, prompts, 9) == expected
    assert without.prefix_index is None


def test_a_whole_prompt_known_already_is_reused_but_for_its_last_page(pair: Pair):
    engine = pair.engine()
    (prompt,) = prompts_of([32], seed=90)
    first = outputs(engine, [prompt], 12)
    assert outputs(engine, [prompt], 12) == first == [pair.greedy(prompt, 12)]
    assert engine.prefix_index.num_reused_tokens == 16


def test_a_page_whose_last_cycle_was_never_refreshed_is_not_reused(pair: Pair):
    engine = pair.engine()
    prompt = prompts_of([16], seed=95)[0]
    outputs(engine, [prompt], 1)
    longer = prompt + prompts_of([5], seed=96)[0]
    assert outputs(engine, [longer], 9) == [pair.greedy(longer, 9)]
    assert engine.prefix_index.num_reused_tokens == (0 if pair.kind.endswith("-refresh") else 16)


def test_too_little_room_preempts_and_resumes_with_the_same_tokens(pair: Pair):
    config = EngineConfig(max_batch=4, max_length=64, cache_tokens=96, chunk_tokens=16, prefix_caching=False)
    engine = pair.engine(config)
    prompts = prompts_of([10, 13, 7, 15], seed=100)
    assert outputs(engine, prompts, 30) == [pair.greedy(prompt, 30) for prompt in prompts]
    assert engine.stats.num_preemptions > 0
    cached = pair.engine(dataclasses.replace(config, prefix_caching=True))
    assert outputs(cached, prompts, 30) == [pair.greedy(prompt, 30) for prompt in prompts]
    assert cached.stats.num_preemptions > 0


def test_cancelled_requests_free_their_pages_and_leave_the_others_alone(pair: Pair):
    engine = pair.engine(EngineConfig(max_batch=2, max_length=64, cache_tokens=256, prefix_caching=False))
    prompts = prompts_of([9, 6, 12], seed=110)
    ids = [engine.submit(prompt, max_new_tokens=12, params=GREEDY) for prompt in prompts]
    for _ in range(5):
        engine.step()
    (cancelled,) = engine.cancel(ids[0])
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < 12
    assert list(cancelled.token_ids) == pair.greedy(prompts[0], 12)[: len(cancelled.token_ids)]
    (waiting,) = engine.cancel(ids[2])
    assert waiting.token_ids == ()
    assert engine.cancel(ids[0]) == []
    engine.check_integrity()
    events = []
    while engine.has_work:
        events += engine.step()
    assert list(events[-1].completion.token_ids) == pair.greedy(prompts[1], 12)
    assert all(group.pages.num_free == group.pages.num_pages for group in engine.store.groups.values())


def test_aligned_heads_run_the_parallel_layers_about_once_per_cycle(pairs):
    passes = {}
    for align_heads in (True, False):
        config = EngineConfig(max_batch=4, max_length=128, cache_tokens=512, align_heads=align_heads)
        engine = pairs["bidirectional-refresh"].engine(config)
        outputs(engine, prompts_of([4, 5, 6, 7], seed=120), 40)
        passes[align_heads] = engine.stats.num_parallel_passes
    assert passes[True] <= 12
    assert passes[False] >= 39


def test_streams_give_the_same_tokens_and_leave_other_requests_their_events(pair: Pair):
    engine = pair.engine()
    first, second = prompts_of([6, 11], seed=140)
    other = engine.submit(second, max_new_tokens=4, params=GREEDY)
    events = list(engine.stream(first, max_new_tokens=10, params=GREEDY))
    assert [event.token_id for event in events] == pair.greedy(first, 10)
    assert [event.completion is None for event in events] == [True] * 9 + [False]
    assert engine.has_work
    kept = engine.step()
    assert [event.request_id for event in kept] == [other] * 4
    assert [event.token_id for event in kept] == pair.greedy(second, 4)


def test_leaving_a_stream_early_cancels_its_request(pairs):
    engine = pairs["bidirectional-norefresh"].engine()
    for event in engine.stream([1, 2, 3], max_new_tokens=40, params=GREEDY):
        assert event.completion is None
        break
    assert not engine.has_work
    engine.check_integrity()


def test_leaving_a_stream_early_loses_no_event_of_another_request(pairs):
    """Both requests get a token in each step, and the stream's comes first."""
    engine = pairs["vanilla"].engine()
    stream = engine.stream([1, 2, 3], max_new_tokens=40, params=GREEDY)
    other = engine.submit([4, 5, 6], max_new_tokens=3, params=GREEDY)
    assert next(stream).request_id != other
    stream.close()
    events = []
    while engine.has_work:
        events += engine.step()
    assert [event.token_id for event in events if event.request_id == other] == pairs["vanilla"].greedy([4, 5, 6], 3)


def test_samples_depend_on_their_seed_only(pair: Pair):
    prompts = prompts_of([6, 9, 3], seed=150)
    params = [SamplingParams(temperature=1.0, seed=seed, ignore_eos=True, n=n) for seed, n in ((5, 3), (6, 1), (5, 1))]
    engine = pair.engine()
    together = engine.generate(prompts, max_new_tokens=9, params=params)
    assert [(completion.sample, completion.prompt_ids) for completion in together] == [
        (0, tuple(prompts[0])), (1, tuple(prompts[0])), (2, tuple(prompts[0])), (0, tuple(prompts[1])), (0, tuple(prompts[2]))
    ]  # fmt: skip
    assert len({completion.token_ids for completion in together}) == 5
    small = pair.engine(EngineConfig(max_batch=1, max_length=64, cache_tokens=64, chunk_tokens=4, prefix_caching=False))
    alone = [small.generate([prompt], max_new_tokens=9, params=own) for prompt, own in zip(prompts, params)]
    assert [completion.token_ids for batch in alone for completion in batch] == [item.token_ids for item in together]


def test_hundreds_of_random_requests_in_random_company(pairs):
    generator = random.Random(11)
    preempted = reused = 0
    for kind, pair in pairs.items():
        stems = prompts_of([40, 40], seed=500)
        known = [generator.choice(stems)[: generator.randint(1, 40)] for _ in range(8)]
        for _ in range(3):
            config = EngineConfig(
                max_batch=generator.choice([1, 3, 5]),
                max_length=96,
                cache_tokens=generator.choice([96, 112, 400]),
                page_size=generator.choice([4, 8, 16]),
                chunk_tokens=generator.choice([2, 5, 16, 64]),
                align_heads=generator.random() < 0.7,
                prefix_caching=generator.random() < 0.7,
            )
            engine = pair.engine(config)
            prompts = [generator.choice(known) for _ in range(12)]
            counts = [generator.randint(1, 20) for _ in prompts]
            ids = [engine.submit(prompt, max_new_tokens=count, params=GREEDY) for prompt, count in zip(prompts, counts)]
            done = {}
            while engine.has_work:
                done |= {event.request_id: event.completion for event in engine.step() if event.completion}
                engine.check_integrity()
            for request_id, prompt, count in zip(ids, prompts, counts):
                assert list(done[request_id].token_ids) == pair.greedy(prompt, 20)[:count], (kind, config)
            preempted += engine.stats.num_preemptions
            reused += engine.prefix_index.num_reused_tokens if engine.prefix_index else 0
    assert preempted > 2
    assert reused > 100


@pytest.mark.parametrize("kind", ["bidirectional-refresh", "causal-norefresh", "vanilla"])
def test_models_with_windows_in_some_layers_are_served_through_prefixes_and_preemption(tmp_path, kind):
    """Several K/V groups per pass; windows of 5 keys, shorter than the prefixes that are reused."""
    kinds = ["sliding_attention", "full_attention"] * 2
    pair = Pair(tmp_path, kind, use_sliding_window=True, sliding_window=5, layer_types=kinds)
    config = EngineConfig(max_batch=3, max_length=64, cache_tokens=80, page_size=4, chunk_tokens=7)
    engine = pair.engine(config)
    assert len(engine.store.groups) == (2 if kind == "vanilla" else 4)
    start = prompts_of([17], seed=600)[0]
    prompts = [start + tail for tail in prompts_of([3, 6, 1, 9], seed=610)]
    expected = [pair.greedy(prompt, 18) for prompt in prompts]
    assert outputs(engine, prompts, 18) == expected
    assert [outputs(engine, [prompt], 18)[0] for prompt in prompts] == expected
    assert engine.stats.num_preemptions > 0 and engine.prefix_index.num_reused_tokens > 16
    assert outputs(pair.engine(dataclasses.replace(config, cuda_graphs="shapes")), prompts, 18) == expected
