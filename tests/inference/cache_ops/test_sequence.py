"""Requests with cache operations in the engine: against the oracle, and what they compute, read, copy and skip.

Level: float64, 1e-11 in log probabilities, and the same greedy tokens; fp32 as stated.
"""

import random

import pytest
import torch

from megatron_dmtd.inference import SamplingParams
from megatron_dmtd.inference.cache_ops.pages import CountedPages
from megatron_dmtd.inference.cache_ops.program import Timeline, parse_program
from megatron_dmtd.inference.cache_ops.sequence import EditedSequence, most_page_sets
from tests.inference.cache_ops.engines import MODELS, NATIVE_MODELS, Checked
from tests.inference.cache_ops.test_closure import brute_force
from tests.oracles.parallel_dmtd import random_weights
from tests.oracles.programs import random_program

each_model = pytest.mark.parametrize("name", MODELS)


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(60), k=count)


@each_model
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_random_programs_cold_warm_and_after_evictions(name, chunk_tokens):
    """In a batch with others, with and without operations, under a cache that holds little more than one of them."""
    chance = random.Random(f"{name}{chunk_tokens}")
    one, text = Checked(name, chunk_tokens=chunk_tokens, cache_tokens=96), ids(60)
    num_tokens = chance.randrange(12, 28)
    tokens, program = text[:num_tokens], random_program(chance, num_tokens, one.cycle_length)
    other = text[:9], random_program(chance, 9, one.cycle_length)
    one.generate([(tokens, program), other, (text[1:12], None)], 5)
    one.engine.evict(tokens, chance.sample(range(num_tokens), 3), cache=program)
    one.generate([(tokens, program), (tokens, None)], 3)
    one.generate([(tokens[:-2], [o for o in program if o["after"] <= num_tokens - 2])], 2)
    one.score(tokens, program)


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_native_kernels_serve_such_requests_together_with_others(name):
    """Level: fp32, 1e-4. Cold, warm, with copies, and after evictions; texts of several pages."""
    chance = random.Random(f"native{name}")
    chunk_tokens = chance.choice([7, 1000])
    one, text = Checked(name, is_native=True, chunk_tokens=chunk_tokens, cache_tokens=576), ids(90)
    num_tokens = chance.randrange(50, 70)
    tokens, program = text[:num_tokens], random_program(chance, num_tokens, one.cycle_length)
    one.generate([(tokens, program), (text[:9], random_program(chance, 9, one.cycle_length)), (text[1:12], None)], 5, atol=1e-4)
    one.engine.evict(tokens, chance.sample(range(num_tokens), 3), cache=program)
    one.generate([(tokens, program), (tokens, None)], 3, atol=1e-4)
    assert one.engine.runner.forward.native is not None


def test_fp32_errs_at_most_twice_as_much_as_without_operations():
    one, text = Checked("qwen3", dtype=torch.float32), ids(40)
    program = [
        {"after": 12, "drop": [[2, 9]]},
        {"after": 20, "reposition": True},
        {"after": 30, "drop": [[0, 2]], "reposition": True},
    ]

    def error(program: list) -> float:
        rows = one.expected(text, program)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
        return (torch.tensor(one.engine.score(text, cache=program), dtype=torch.float64) - rows).abs().max().item()

    plain = error([])
    assert 0 < plain < 1e-4 and error(program) < 2 * plain + 1e-6


PROGRAM = [{"after": 10, "drop": [[2, 6]]}, {"after": 15, "reposition": True}, {"after": 21, "drop": [[8, 14]]}]


@each_model
def test_a_warm_hit_computes_the_last_token_and_copies_nothing(name):
    one, text = Checked(name), ids(30)
    (cold,) = one.generate([(text, PROGRAM)], 2)
    (warm,) = one.generate([(text, PROGRAM)], 2)
    assert (cold.usage.cached_tokens, cold.usage.repos_tokens, cold.usage.drop_skipped_tokens) == (0, 0, 0)
    last = len(text) - (len(text) - 1) // one.cycle_length * one.cycle_length
    assert warm.usage.prefill_tokens == last and warm.usage.repos_tokens == 0
    assert warm.usage.drop_skipped_tokens == 10
    assert warm.usage.cached_tokens + 10 + last == 30
    assert warm.token_ids == cold.token_ids


def test_a_longer_text_copies_exactly_the_survivors_that_move():
    one, text = Checked("qwen3"), ids(30)
    one.generate([(text[:20], [{"after": 10, "drop": [[2, 6]]}])], 1)
    program = [{"after": 10, "drop": [[2, 6]]}, {"after": 19, "reposition": True}]
    before = _pages_of(one)
    (done,) = one.generate([(text[:25], program)], 3)
    usage = done.usage
    assert (usage.cached_tokens, usage.repos_tokens, usage.drop_skipped_tokens, usage.prefill_tokens) == (2, 13, 4, 6)
    after = _pages_of(one)
    assert all(torch.equal(after[key], pages) for key, pages in before.items()), "sources stay byte for byte"
    (again,) = one.generate([(text[:25], program)], 3)
    assert (again.usage.repos_tokens, again.usage.prefill_tokens, again.token_ids) == (0, 1, done.token_ids)


def _pages_of(one: Checked) -> dict:
    found = {}
    for tables in one.engine.tree.owned():
        for name, table in tables.items():
            for place, pages in enumerate(one.engine.store.groups[name].places):
                found[name, place, table.pages[0]] = pages.k_PGDT[table.pages[0]].clone()
    return found


@pytest.mark.parametrize("name", ["qwen3", "real-causal, threes", "shadow-bidirectional, threes"])
def test_what_was_evicted_is_computed_again_exactly_as_far_as_something_reads_it(name):
    chance, one = random.Random(name), Checked(name)
    length, spared = one.cycle_length, 0
    for number in range(6):
        text = ids(chance.randrange(12, 30), seed=number + 1)
        program = random_program(chance, len(text), length)
        one.generate([(text, program)], 1)
        whole = (len(text) - 1) // length * length
        gone = chance.sample(range(whole), min(5, whole))
        assert one.engine.evict(text, gone, cache=program) > 0
        (done,) = one.generate([(text, program)], 2)
        timeline = Timeline(parse_program(program, len(text)), length, len(text) + 1)
        is_cached = [token < whole and token not in gone for token in range(timeline.num_tokens)]
        # Tokens that the cold run had no reason to compute were never cached.
        computed = brute_force(timeline.expiry.tolist(), [False] * timeline.num_tokens, len(text), length)
        is_cached = [is_cached[token] and token // length in computed for token in range(timeline.num_tokens)]
        closure = brute_force(timeline.expiry.tolist(), is_cached, len(text), length)
        assert done.usage.prefill_tokens == sum(min(length, len(text) - cycle * length) for cycle in closure)
        spared += len({token // length for token in gone} - set(closure))
    assert spared > 0, "a hole that nothing reads"


def test_a_raw_text_longer_than_the_model_and_the_cache_is_served():
    one = Checked("qwen3", cache_tokens=72, max_length=40, chunk_tokens=16)
    text = ids(120)
    program = [
        operation
        for after in range(20, 120, 10)
        for operation in ({"after": after, "drop": [[after - 18, after - 8]]}, {"after": after, "reposition": True})
    ]
    one.generate([(text, program)], 4)


def test_the_most_that_is_owned_is_counted_in_advance():
    program = parse_program([{"after": 8, "drop": [[0, 8]]}, {"after": 16, "drop": [[8, 16]]}], 24)
    one = Checked("qwen3")
    timeline = Timeline(program, 1, 30)
    assert most_page_sets(timeline, one.engine.method, 24, 29, 4) == 4


@each_model
def test_counting_by_segments_is_counting_by_cycles(name):
    """Equal numbers, for random programs and page sizes; the slow count takes one cycle of the prompt at a time."""
    method, chance = Checked(name).engine.method, random.Random(name)
    length, num_given_back = method.cycle_length, 0
    for _ in range(60):
        num_tokens, size = chance.randrange(8, 80), length * chance.choice((1, 2, 4))
        timeline = Timeline(parse_program(random_program(chance, num_tokens, length), num_tokens), length, num_tokens + 6)
        pages = CountedPages(size)
        sequence = EditedSequence(timeline, method, [0] * num_tokens, pages=pages, tree=None)
        sequence.begin()
        while sequence.pending:
            sequence.chunk(sequence.stops(length)[0])
            sequence.finish(is_shared=False)
        for _ in range(5):
            sequence.tokens.append(0)
            sequence.chunk(len(sequence.tokens))
            sequence.finish(is_shared=False)
        assert most_page_sets(timeline, method, num_tokens, num_tokens + 5, size) == pages.most_used
        num_given_back += pages.most_used > pages.num_used
    assert num_given_back > 0


def test_samples_sampling_and_preemption_go_on_working():
    one, text = Checked("qwen3", cache_tokens=72, max_length=60), ids(24)
    params = SamplingParams(temperature=1.0, seed=5, n=3, ignore_eos=True)
    crowded = one.engine.generate([text, text[:20]], max_new_tokens=20, params=params, cache=[PROGRAM, PROGRAM[:2]])
    assert one.engine.stats.num_preemptions > 0
    roomy = Checked("qwen3").engine.generate([text, text[:20]], max_new_tokens=20, params=params, cache=[PROGRAM, PROGRAM[:2]])
    assert [done.token_ids for done in crowded] == [done.token_ids for done in roomy] and len(set(crowded)) == 6
    one.engine.check_integrity()


@pytest.mark.parametrize("name", ["qwen3", "real-bidirectional, fours, windows"])
def test_new_weights_forget_what_the_old_ones_have_cached(name):
    one, tokens = Checked(name), ids(24)
    one.generate([(tokens, PROGRAM)], 4)
    one.weights = random_weights(one.shape, seed=9)
    one.engine.update_weights(one.weights)
    (done,) = one.generate([(tokens, PROGRAM)], 4)
    assert done.usage.prefill_tokens == 24


def test_bf16_errs_as_much_as_without_operations():
    """Level: bf16, some hundredths of the logits."""
    one, tokens = Checked("qwen3", dtype=torch.bfloat16), ids(24)
    one.generate([(tokens, []), (tokens, PROGRAM)], 3, atol=0.2)
