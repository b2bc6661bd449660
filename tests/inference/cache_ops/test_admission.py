"""Requests with cache operations at the engine's door."""

import pytest

from megatron_dmtd.errors import DMTDError
from tests.inference.cache_ops.engines import Checked
from tests.inference.cache_ops.test_sequence import ids


def test_a_bad_request_is_refused_by_its_index_and_harms_no_other():
    one, text = Checked("qwen3", max_length=40), ids(30)
    program = [{"after": 9, "drop": [[1, 5]]}]
    bad = [{"after": 9, "drop": [[1, 5]]}, {"after": 12, "drop": [[3, 14]]}]
    good, wrong, long = one.engine.generate([text, text, text * 2], max_new_tokens=4, cache=[program, bad, program])
    assert good.finish_reason == "length" and wrong.finish_reason == long.finish_reason == "refused"
    assert "cache[1].drop[0]=[3, 14]" in str(wrong.refusal) and wrong.usage is None
    assert "position 40 of token 40" in str(long.refusal)
    with pytest.raises(DMTDError, match="for 1 prompts, and 2 prompts"):
        one.engine.generate([text, text], max_new_tokens=4, cache=[program])
    with pytest.raises(DMTDError, match=r"cache\[0\].after=31"):
        next(one.engine.stream(text, max_new_tokens=1, cache=[{"after": 31, "reposition": True}]))


def test_what_cannot_be_cached_at_one_time_is_refused():
    one, text = Checked("qwen3", cache_tokens=48, max_length=40), ids(90)
    with pytest.raises(DMTDError, match="nothing active"):
        one.engine.submit(text, max_new_tokens=4, cache=[{"after": 40, "drop": [[0, 40]], "reposition": True}])
    program = [{"after": 39, "drop": [[0, 1]]}, {"after": 39, "reposition": True}]
    with pytest.raises(DMTDError, match="must be cached at one time"):
        one.engine.submit(text[:39], max_new_tokens=1, cache=program)


def test_the_state_is_told_without_computing():
    one = Checked("real-causal, threes")
    program = [{"after": 4, "drop": [[0, 2]]}, {"after": 5, "reposition": True}]
    before, after = (one.engine.cache_state(ids(count), cache=program) for count in (5, 7))
    assert (before.active, before.next_position) == ([0, 1, 2, 3, 4], 5), "the head of the next cycle is not reached"
    assert (after.active, after.positions, after.next_position) == ([2, 3, 4, 5, 6], [0, 1, 2, 3, 4], 5)
    assert one.engine.stats.num_steps == 0


def test_tokens_that_are_evicted_are_named_by_raw_index():
    one, text = Checked("qwen3"), ids(12)
    one.generate([(text, [])], 1)
    assert one.engine.evict(text, [3, 4], cache=[]) == 2 and one.engine.evict(text, [3], cache=[]) == 0
    with pytest.raises(DMTDError, match="raw index 12"):
        one.engine.evict(text, [12])
