import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.inference import EngineConfig, score
from tests.hf.tiny import random_ids
from tests.inference.models import Pair


@pytest.mark.parametrize("chunk_tokens", [3, 6, 64])
def test_scores_are_those_of_the_training_forward(pair: Pair, chunk_tokens):
    engine = pair.engine(EngineConfig(max_batch=1, max_length=64, cache_tokens=64, chunk_tokens=chunk_tokens))
    ids = random_ids(1, 39, seed=5)
    with torch.no_grad():
        expected = pair.slow(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert expected.std() > 1
    engine.generate([ids[0, :20].tolist()], max_new_tokens=8)  # leaves prefixes in the pools
    scores = torch.tensor(score(engine, ids[0].tolist()), dtype=torch.float64)
    # transformers' own Qwen3 norms in fp32 whatever the type of the weights.
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5 if pair.kind == "vanilla" else 1e-10)
    engine.check_integrity()
    assert engine.pools.sequential.pages.num_free == engine.pools.sequential.pages.num_pages


def test_a_text_of_one_token_has_no_scores(pair: Pair):
    assert score(pair.engine(), [4]) == []


def test_scoring_refuses_busy_engines_and_bad_texts(pairs):
    engine = pairs["causal-refresh"].engine()
    with pytest.raises(DataError, match="an empty prompt"):
        score(engine, [])
    engine.submit([1, 2], max_new_tokens=3)
    with pytest.raises(ConfigError, match="unfinished requests"):
        score(engine, [1, 2])
