import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.inference import EngineConfig, SamplingParams, score
from tests.hf.tiny import random_ids
from tests.inference.models import Pair


@pytest.mark.parametrize("chunk_tokens", [3, 6, 64])
def test_scores_are_those_of_the_training_forward(pair: Pair, chunk_tokens):
    engine = pair.engine(EngineConfig(max_batch=1, max_length=64, cache_tokens=64, chunk_tokens=chunk_tokens))
    ids = random_ids(1, 39, seed=5)
    with torch.no_grad():
        expected = pair.slow(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert expected.std() > 1
    engine.generate([ids[0, :20].tolist()], max_new_tokens=8)  # leaves prefixes in the store
    scores = torch.tensor(score(engine, ids[0].tolist()), dtype=torch.float64)
    # transformers' own Qwen3 norms in fp32 whatever the type of the weights.
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5 if pair.kind == "vanilla" else 1e-10)
    engine.prefix_index.clear()
    engine.check_integrity()
    assert all(group.pages.num_free == group.pages.num_pages for group in engine.store.groups.values())


def test_a_text_of_one_token_has_no_scores(pair: Pair):
    assert score(pair.engine(), [4]) == []


def test_bad_texts_are_refused(pairs):
    engine = pairs["causal-refresh"].engine()
    with pytest.raises(DataError, match="an empty prompt"):
        score(engine, [])
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        engine.submit([1, 2], max_new_tokens=0)
    with pytest.raises(ConfigError, match="prompt_logprobs=-1"):
        engine.submit([1, 2], max_new_tokens=1, params=SamplingParams(prompt_logprobs=-1))


def test_scores_do_not_depend_on_company_preemption_or_prefixes_and_company_does_not_see_them(pair: Pair):
    """A store that holds two of the five at their ends: the others are preempted halfway, and are computed and scored again."""
    texts = [random_ids(1, length, seed=length)[0].tolist() for length in (10, 23, 17, 10, 13)]
    alone = [score(pair.engine(), text) for text in texts]
    plain = [pair.engine().generate([text], max_new_tokens=30)[0].token_ids for text in texts]
    engine = pair.engine(EngineConfig(max_batch=4, max_length=64, cache_tokens=88, page_size=4, chunk_tokens=8))
    engine.generate([texts[0]], max_new_tokens=1)  # its prefix is known from here on
    params = [SamplingParams(prompt_logprobs=3) if index % 2 == 0 else SamplingParams() for index in range(5)]
    found = engine.generate(texts, max_new_tokens=30, params=params)
    assert engine.stats.num_preemptions > 0
    for index, (completion, scores) in enumerate(zip(found, alone, strict=True)):
        assert completion.token_ids == plain[index]
        given = completion.prompt_logprobs
        assert [choice.logprob for choice in given] == pytest.approx(scores if index % 2 == 0 else [], abs=1e-10)
        assert all(len(choice.top_logprobs) == 3 and choice.top_logprobs[0][1] >= choice.logprob for choice in given)
    engine.check_integrity()
    waiting = engine.submit(texts[1], max_new_tokens=30)
    assert score(engine, texts[0]) == pytest.approx(alone[0], abs=1e-10)
    events = []
    while engine.has_work:
        events += engine.step()
    assert tuple(event.token_id for event in events if event.request_id == waiting) == plain[1]
