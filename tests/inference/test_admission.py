"""What is let in, and what is refused by name, one request at a time."""

import pytest

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.inference import EngineConfig, SamplingParams
from tests.hf.tiny import random_ids
from tests.inference.models import PENALTY, Pair

GREEDY = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)


def test_bad_requests_are_refused_by_themselves(pair: Pair):
    engine = pair.engine(EngineConfig(max_batch=2, max_length=32, cache_tokens=64))
    good = random_ids(5, seed=130).tolist()
    bad = [[], [61], [-1, 2], [1] * 30]
    completions = engine.generate([good, *bad, good], max_new_tokens=6, params=GREEDY)
    assert [completion.finish_reason for completion in completions] == ["length", *["refused"] * 4, "length"]
    assert [type(completion.refusal) for completion in completions[1:5]] == [DataError] * 4
    assert completions[0].token_ids == completions[5].token_ids == tuple(pair.greedy(good, 6))
    required = [completion.refusal.required for completion in completions[1:5]]
    assert required == ["at least one token", "ids from 0 to 60", "ids from 0 to 60", "at most 32 tokens together"]


def test_impossible_parameters_are_refused(pairs):
    engine = pairs["causal-refresh"].engine()
    (completion,) = engine.generate([[1]], max_new_tokens=4, params=SamplingParams(top_p=0.0))
    assert completion.refusal.required == "above 0, at most 1"
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        engine.submit([1], max_new_tokens=0)
    with pytest.raises(ConfigError, match="2 sets of parameters for 1 prompts"):
        engine.generate([[1]], max_new_tokens=4, params=[GREEDY, GREEDY])


@pytest.mark.parametrize("prompt", ["text", 5, None, [1.5], ["1"], [[1]]], ids=repr)
def test_what_is_no_list_of_ids_is_refused_and_not_guessed_at(pairs, prompt):
    engine = pairs["causal-refresh"].engine()
    good, bad = engine.generate([[1, 2], prompt], max_new_tokens=3)
    assert (good.finish_reason, bad.finish_reason, bad.prompt_ids) == ("length", "refused", ())
    assert "list of token ids" in str(bad.refusal)
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("max_new_tokens", [1.5, "3", None], ids=repr)
def test_a_length_cap_that_is_no_integer_is_refused(pairs, max_new_tokens):
    with pytest.raises(ConfigError, match="an integer of at least 1"):
        pairs["causal-refresh"].engine().submit([1], max_new_tokens=max_new_tokens)


def test_parameters_of_another_type_are_refused(pairs):
    with pytest.raises(ConfigError, match="params of type dict"):
        pairs["causal-refresh"].engine().submit([1], max_new_tokens=1, params={"temperature": 1.0})
