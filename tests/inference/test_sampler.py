"""Each step against transformers' own processors, and the random numbers against themselves."""

import math

import pytest
import torch
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_dmtd.inference.sampler import choose, truncated, uniform
from megatron_dmtd.inference.sampling_params import SamplingParams

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3
TOKENS = [4, 7, 7, 21]


def drawn(params: SamplingParams, count: int = 2000) -> list[int]:
    return [choose(LOGITS, params, [1] * (1 + number), 1).token_id for number in range(count)]


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(top_k=7), TopKLogitsWarper(7)),
        (SamplingParams(top_k=500), TopKLogitsWarper(50)),
        (SamplingParams(top_p=0.8), TopPLogitsWarper(0.8)),
        (SamplingParams(top_p=1e-6), TopPLogitsWarper(1e-6)),
        (SamplingParams(min_p=0.05), MinPLogitsWarper(0.05)),
    ],
)
def test_truncation_keeps_the_tokens_that_transformers_keeps(params, warper):
    expected = warper(None, LOGITS[None].clone())[0]
    assert torch.equal(truncated(LOGITS, params), expected)
    assert bool(expected.isinf().any()) == (params.top_k != 500)


def test_bias_and_penalties_change_the_largest_logit_as_in_transformers():
    biased = SequenceBiasLogitsProcessor([[[30], 50.0]])(torch.tensor([TOKENS]), LOGITS[None].clone())
    penalised = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([TOKENS]), LOGITS[None].clone())
    best = int(LOGITS.argmax())
    assert choose(LOGITS, SamplingParams(logit_bias={30: 50.0}), TOKENS, 2).token_id == int(biased.argmax()) == 30 != best
    tokens = [*TOKENS, best]
    penalised = RepetitionPenaltyLogitsProcessor(9.0)(torch.tensor([tokens]), LOGITS[None].clone())
    assert choose(LOGITS, SamplingParams(repetition_penalty=9.0), tokens, 2).token_id == int(penalised.argmax()) != best


def test_presence_penalty_counts_tokens_of_the_output_only():
    best = int(LOGITS.argmax())
    params = SamplingParams(presence_penalty=100.0)
    assert choose(LOGITS, params, [best, 1], 1).token_id == best
    assert choose(LOGITS, params, [1, best, best], 1).token_id == int(LOGITS.topk(2).indices[1])


def test_a_forbidden_token_is_never_drawn():
    best = int(LOGITS.argmax())
    assert best in drawn(SamplingParams(temperature=1.0), 50)
    assert best not in drawn(SamplingParams(temperature=1.0, logit_bias={best: -math.inf}))


def test_frequencies_are_the_probabilities():
    counts = torch.bincount(torch.tensor(drawn(SamplingParams(temperature=1.5))), minlength=50) / 2000
    assert (counts - (LOGITS / 1.5).softmax(-1)).abs().max() < 0.03


def test_numbers_are_even_and_differ_by_seed_sample_and_place():
    numbers = torch.tensor([uniform(1, 0, number) for number in range(4000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    histogram = torch.histc(numbers, 10, 0, 1)
    assert histogram.min() > 320 and histogram.max() < 480
    assert len({uniform(seed, sample, number) for seed in (-1, 0, 1) for sample in (0, 1) for number in (0, 1)}) == 12
    assert uniform(3, 1, 4) == uniform(3, 1, 4)


def test_log_probabilities_are_the_models_own():
    params = SamplingParams(temperature=0.7, top_k=2, logit_bias={3: 90.0}, logprobs=4)
    choice = choose(LOGITS, params, TOKENS, 2)
    expected = LOGITS.log_softmax(-1)
    assert choice.token_id == 3
    assert choice.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in choice.top_logprobs] == LOGITS.topk(4).indices.tolist()
    assert choice.top_logprobs[0][1] == pytest.approx(float(expected.max()))
    assert choose(LOGITS, SamplingParams(), TOKENS, 2).logprob is None


def test_logits_are_left_as_they_were():
    before = LOGITS.clone()
    choose(LOGITS, SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0, top_p=0.5), TOKENS, 2)
    assert torch.equal(LOGITS, before)
