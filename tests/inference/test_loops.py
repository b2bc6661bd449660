"""Looped layers in the engine, in float64 against an oracle that shares no code with it."""

import dataclasses

import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.inference import Engine, SamplingParams
from megatron_dmtd.inference.loops import Pieces
from tests.hf.tiny import random_ids
from tests.inference.looped_models import engine_of, logprobs_of, oracle_logits
from tests.oracles.looped import Looped, random_weights

WINDOWS = (None, 5, None, 5)
NORMALIZED = Looped(windows=WINDOWS)
PLAIN = Looped(windows=WINDOWS, normalized=False, injection="add")
LEARNED = Looped(windows=(None, None, None), num_recurrent_layers=1, normalized=False, injection="concat_linear")
MODELS = {"normalized": NORMALIZED, "add": PLAIN, "concat_linear": LEARNED}
#: the loop in the parallel layers, with one after it there; or in the sequential ones, or at the end of a pass
CYCLED = {
    "parallel": dataclasses.replace(NORMALIZED, num_output_layers=2, windows=(None, 5, None, 5, None), num_parallel_layers=4),
    "parallel, at its end": dataclasses.replace(PLAIN, num_parallel_layers=3),
    "sequential": dataclasses.replace(NORMALIZED, num_parallel_layers=1, cycle_length=3, mask_token_id=60),
    "sequential, at its end": dataclasses.replace(PLAIN, num_output_layers=0, windows=(None, 5, None), num_parallel_layers=1),
}
FOUR = ("shadow-causal", "real-causal", "shadow-bidirectional", "real-bidirectional")
CLOSE = 1e-11
each_model = pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
each_mode = pytest.mark.parametrize("mode", ["per_loop", "last_loop"])


def ids(length: int, seed: int) -> list[int]:
    return random_ids(length, seed=seed).tolist()


def check(
    engine: Engine, shape: Looped, weights, requests: list[tuple[list[int], object]], count: int, *, kind="vanilla", **edits
) -> list:
    """Generate, and compare the log probability of every token with the oracle's for the request alone."""
    loop = engine.model.schedule.decoder.loop
    params = [SamplingParams(ignore_eos=True, logprobs=0, num_loops=loops) for _, loops in requests]
    programs = [edits["cache"]] * len(requests) if edits else None
    done = engine.generate([prompt for prompt, _ in requests], max_new_tokens=count, params=params, cache=programs)
    for (prompt, loops), one in zip(requests, done, strict=True):
        assert one.finish_reason == "length", one.refusal
        tokens = [*prompt, *one.token_ids]
        logits = oracle_logits(
            shape,
            weights,
            tokens,
            prompt_length=len(prompt),
            chunk=engine.prefill_chunk,
            mode=loop.kv_cache_mode,
            loops=loop.num_loops if loops is None else loops,
            kind=kind,
            expiry=edits.get("expiry"),
        )
        assert list(one.token_ids) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        expected = logprobs_of(logits, tokens)[len(prompt) - 1 :]
        found = torch.tensor([choice.logprob for choice in one.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)
    engine.check_integrity()
    return done


@each_model
@each_mode
@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_scores_are_the_oracles_in_pieces_of_any_length(shape, mode, num_loops):
    weights, text = random_weights(shape, seed=1), ids(19, 4)
    found = {}
    for chunk in (8, 3, 1):
        engine = engine_of(shape, weights, kv_mode=mode, num_loops=num_loops, prefill_chunk=chunk)
        found[chunk] = torch.tensor(engine.score(text), dtype=torch.float64)
        logits = oracle_logits(shape, weights, text, prompt_length=len(text), chunk=chunk, mode=mode, loops=num_loops)
        torch.testing.assert_close(found[chunk], logprobs_of(logits, text), rtol=0, atol=CLOSE)
    apart = max(float((found[8] - other).abs().max()) for other in found.values())
    assert (apart < 1e-12) if mode == "per_loop" or num_loops == 1 else (apart > 1e-2)


@each_mode
@pytest.mark.parametrize("cuda_graphs", ["off", "shapes"])
def test_requests_of_different_loops_in_one_batch_get_what_each_gets_alone(mode, cuda_graphs):
    weights = random_weights(NORMALIZED, seed=2)
    engine = engine_of(NORMALIZED, weights, num_loops=3, kv_mode=mode, prefill_chunk=6, cuda_graphs=cuda_graphs)
    requests = [(ids(9, 1), 1), (ids(14, 2), 3), (ids(1, 3), None), (ids(7, 4), 2), (ids(12, 5), 1)]
    check(engine, NORMALIZED, weights, requests, 9)


def test_with_one_cache_for_all_loops_their_number_may_change_from_token_to_token():
    weights = random_weights(NORMALIZED, seed=2)
    engine = engine_of(NORMALIZED, weights, kv_mode="last_loop", prefill_chunk=4)
    check(engine, NORMALIZED, weights, [(ids(9, 1), (1, 3, 1, 5)), (ids(6, 2), (4, 1)), (ids(3, 3), 6)], 7)


@each_model
def test_one_loop_is_the_straight_stack_in_both_modes(shape):
    weights, text = random_weights(shape, seed=3), ids(17, 6)
    scores = [
        torch.tensor(engine_of(shape, weights, num_loops=1, kv_mode=mode, prefill_chunk=5).score(text))
        for mode in ("per_loop", "last_loop")
    ]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-12)


@each_mode
def test_too_little_room_preempts_and_changes_no_number(mode):
    weights = random_weights(NORMALIZED, seed=5)
    engine = engine_of(NORMALIZED, weights, kv_mode=mode, prefill_chunk=4, cache_tokens=40, max_length=40, prefix_caching=False)
    check(engine, NORMALIZED, weights, [(ids(9, 1), None), (ids(11, 2), None), (ids(6, 3), 1)], 18)
    assert engine.stats.num_preemptions > 0


@each_mode
def test_cached_prefixes_change_no_number_and_serve_only_the_same_loops(mode):
    weights, start = random_weights(NORMALIZED, seed=5), ids(21, 7)
    engine = engine_of(NORMALIZED, weights, num_loops=3, kv_mode=mode, prefill_chunk=8)
    check(engine, NORMALIZED, weights, [(start, None)], 5)
    assert engine.prefix_index.num_reused_tokens == 0
    check(engine, NORMALIZED, weights, [(start[:19] + ids(4, 8), None)], 5)
    # Pages have four tokens; with one cache for all loops only whole pieces can be reused.
    reused = engine.prefix_index.num_reused_tokens
    assert reused == 16
    check(engine, NORMALIZED, weights, [(start[:14] + ids(4, 9), None)], 5)
    assert engine.prefix_index.num_reused_tokens - reused == (12 if mode == "per_loop" else 8)
    reused = engine.prefix_index.num_reused_tokens
    check(engine, NORMALIZED, weights, [(start, 2)], 5)
    assert engine.prefix_index.num_reused_tokens == reused
    check(engine, NORMALIZED, weights, [(start, 2), (start, 3)], 5)
    assert engine.prefix_index.num_reused_tokens - reused == (40 if mode == "per_loop" else 32)


@each_mode
def test_an_output_that_becomes_a_prompt_is_reused_only_where_it_would_be_computed_alike(mode):
    weights = random_weights(NORMALIZED, seed=5)
    engine = engine_of(NORMALIZED, weights, kv_mode=mode, prefill_chunk=8)
    (one,) = check(engine, NORMALIZED, weights, [(ids(9, 7), None)], 16)
    check(engine, NORMALIZED, weights, [([*one.prompt_ids, *one.token_ids], None)], 3)
    assert engine.prefix_index.num_reused_tokens == (24 if mode == "per_loop" else 8)


@pytest.mark.parametrize("shape", CYCLED.values(), ids=CYCLED)
@pytest.mark.parametrize("kind", FOUR)
@each_mode
def test_loops_and_cycles_decode_by_the_schedule(shape, kind, mode):
    weights, page = random_weights(shape, seed=6), 4 * shape.cycle_length
    chunk = 2 * shape.cycle_length
    engine = engine_of(shape, weights, kind, num_loops=3, kv_mode=mode, prefill_chunk=chunk, page_size=page, prefix_caching=False)
    check(engine, shape, weights, [(ids(11, 1), None), (ids(2, 2), 2), (ids(8, 3), 1)], 10, kind=kind)
    text = ids(15, 9)
    logits = oracle_logits(shape, weights, text, prompt_length=len(text), chunk=chunk, mode=mode, loops=3, kind=kind)
    found = torch.tensor(engine.score(text), dtype=torch.float64)
    torch.testing.assert_close(found, logprobs_of(logits, text), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", FOUR)
def test_loops_and_cycles_in_static_shapes_and_with_cached_prefixes(kind):
    shape = CYCLED["parallel"]
    weights, start = random_weights(shape, seed=6), ids(18, 7)
    for mode, reused in (("per_loop", 16), ("last_loop", 0)):
        engine = engine_of(shape, weights, kind, num_loops=2, kv_mode=mode, prefill_chunk=8, cuda_graphs="shapes")
        check(engine, shape, weights, [(start, None)], 7, kind=kind)
        check(engine, shape, weights, [(start + ids(3, 8), None), (ids(4, 9), 1)], 7, kind=kind)
        assert engine.prefix_index is None if mode == "last_loop" else engine.prefix_index.num_reused_tokens == reused


DROP = [{"after": 6, "drop": [[1, 4]]}, {"after": 11, "drop": [[5, 6], [7, 9]]}]
EXPIRY = {1: 6, 2: 6, 3: 6, 5: 11, 7: 11, 8: 11}


@each_mode
@each_model
def test_drops_hide_the_entries_of_every_loop(shape, mode):
    weights = random_weights(shape, seed=5)
    engine = engine_of(shape, weights, num_loops=3, kv_mode=mode, prefill_chunk=8)
    requests = [(ids(14, 7), None), (ids(14, 7), 2), (ids(14, 8), 1)]
    for _ in range(2):
        done = check(engine, shape, weights, requests, 6, cache=DROP, expiry=EXPIRY)
    found = [one.usage.cached_tokens > 0 for one in done]
    assert found == [mode == "per_loop"] * 3


@each_mode
def test_drops_survive_a_preemption(mode):
    weights = random_weights(PLAIN, seed=5)
    room = {"cache_tokens": 44, "max_length": 40, "prefix_caching": False}
    engine = engine_of(PLAIN, weights, num_loops=2, kv_mode=mode, prefill_chunk=4, **room)
    requests = [(ids(14, seed), None) for seed in (7, 8, 9)]
    check(engine, PLAIN, weights, requests, 14, cache=DROP, expiry=EXPIRY)
    assert engine.stats.num_preemptions > 0


def test_cache_operations_that_would_not_be_exact_are_refused_by_name():
    engine = engine_of(NORMALIZED, random_weights(NORMALIZED, seed=1))
    moving = [{"after": 2, "drop": [[0, 1]]}, {"after": 2, "reposition": True}]
    with pytest.raises(DataError, match=r"cache\[1\]: a reposition for a decoder that scales queries"):
        engine.submit([1, 2, 3], max_new_tokens=1, cache=moving)
    plain = engine_of(PLAIN, random_weights(PLAIN, seed=1))
    assert plain.cache_state([1, 2, 3], cache=moving).positions == [0, 1]
    shape = CYCLED["parallel"]
    cycled = engine_of(shape, random_weights(shape, seed=1), FOUR[0], kv_mode="last_loop")
    with pytest.raises(DataError, match="last_loop"):
        cycled.submit([1, 2, 3], max_new_tokens=1, cache=[])


def cache_bytes_per_token(engine: Engine) -> float:
    """Memory of all pages over the tokens that they hold, as allocated."""
    places = [place for group in engine.store.groups.values() for place in group.places]
    return sum(place.k_PGDT.nbytes + place.v_PGTD.nbytes for place in places) / (engine.store.num_pages * engine.store.page_size)


def test_cache_bytes_per_token_are_those_of_the_formula():
    weights, entry = random_weights(NORMALIZED, seed=1), 2 * 2 * 8 * 8  # K and V, heads, width, float64
    for loops in (1, 2, 4):
        per_loop, last_loop = (
            cache_bytes_per_token(engine_of(NORMALIZED, weights, num_loops=loops, kv_mode=mode))
            for mode in ("per_loop", "last_loop")
        )
        assert per_loop == (1 + 2 * loops + 1) * entry
        assert last_loop == (1 + 2 + 1) * entry


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_loops": 0}, "num_loops=0"),
        ({"num_loops": 1.5}, "num_loops=1.5"),
        ({"num_loops": -1}, "num_loops=-1"),
        ({"num_loops": True}, "num_loops=True"),
        ({"kv_mode": "every_loop"}, "kv_mode='every_loop'"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"prefill_chunk": 2.0}, "prefill_chunk=2.0"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_loaded(arguments, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        Engine(tmp_path / "nothing here", **arguments)


def test_a_decoder_without_a_loop_has_none(pairs):
    pair = pairs["vanilla"]
    assert pair.engine(num_loops=1, prefill_chunk=5).prefill_chunk == 5
    for arguments in ({"num_loops": 2}, {"kv_mode": "per_loop"}):
        with pytest.raises(ConfigError, match="layers run once"):
            pair.engine(**arguments)
    engine = pair.engine()
    with pytest.raises(ConfigError, match="num_loops=2"):
        engine.submit([1, 2], max_new_tokens=1, params=SamplingParams(num_loops=2))


def test_loops_that_a_request_cannot_have_are_refused_by_name():
    weights = random_weights(NORMALIZED, seed=1)
    per_loop, last_loop = (engine_of(NORMALIZED, weights, num_loops=3, kv_mode=mode) for mode in ("per_loop", "last_loop"))
    for asked in (0, -1, 1.5, True, (), (2, 0), "2"):
        with pytest.raises(ConfigError, match="num_loops="):
            last_loop.submit([1, 2], max_new_tokens=1, params=SamplingParams(num_loops=asked))
    with pytest.raises(ConfigError, match="at most 3, the loops that the cache has places for"):
        per_loop.submit([1, 2], max_new_tokens=1, params=SamplingParams(num_loops=4))
    with pytest.raises(ConfigError, match="one number"):
        per_loop.submit([1, 2], max_new_tokens=1, params=SamplingParams(num_loops=(1, 2)))
    shape = CYCLED["sequential"]
    with pytest.raises(ConfigError, match="prefill_chunk=4 with last_loop and cycles of 3"):
        engine_of(shape, random_weights(shape, 1), FOUR[0], page_size=12, kv_mode="last_loop", prefill_chunk=4)


def test_pieces_end_where_the_prompt_says_whatever_is_known():
    pieces = Pieces(prompt_length=10, loops=(2, 5, 3), length=4)
    assert [pieces.stop(start, 14) for start in (0, 4, 8, 10, 11)] == [4, 8, 10, 11, 12]
    assert [pieces.num_loops(start) for start in (0, 8, 10, 11, 12)] == [2, 2, 5, 3, 3]
    assert (pieces.num_shareable(7), pieces.num_shareable(13)) == (7, 10)
    assert Pieces(prompt_length=10).num_shareable(13) == 13
