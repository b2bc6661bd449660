"""The step loop: what one step computes and counts, and what a request holds when it ends."""

from megatron_dmtd.inference import EngineConfig, SamplingParams
from tests.inference.models import Pair


def test_a_step_gives_one_token_to_each_request_whose_prompt_is_complete(pair: Pair):
    engine = pair.engine(EngineConfig(max_batch=2, max_length=64, cache_tokens=128, chunk_tokens=8, align_heads=False))
    first = engine.submit([1, 2, 3], max_new_tokens=3, params=SamplingParams(ignore_eos=True))
    long = engine.submit(list(range(20)), max_new_tokens=1, params=SamplingParams(ignore_eos=True))
    seen = []
    while engine.has_work:
        seen.append([event.request_id for event in engine.step()])
    assert seen == [[first], [first], [first, long]]
    stats = engine.stats
    # 3 + 4 tokens in the first step, then 8 and 8 of the long prompt next to single ones
    assert (stats.num_steps, stats.num_new_tokens, stats.num_prompt_tokens) == (3, 4, 23)
    assert stats.num_parallel_passes == (0 if pair.kind == "vanilla" else 3)


def test_an_idle_engine_steps_without_doing_anything(pair: Pair):
    engine = pair.engine()
    assert engine.step() == [] and engine.stats.num_steps == 0


def test_a_prompt_of_which_only_the_log_probabilities_are_asked_for_ends_without_a_token(pair: Pair):
    engine = pair.engine()
    engine.submit([5, 6, 7, 8, 9], max_new_tokens=0, params=SamplingParams(prompt_logprobs=1))
    (event,) = engine.step()
    assert event.choice is None and event.completion.token_ids == () and event.completion.finish_reason == "length"
    assert len(event.completion.prompt_logprobs) == 4
    assert not engine.has_work
    engine.check_integrity()
