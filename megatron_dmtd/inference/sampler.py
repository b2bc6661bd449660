"""From logits to a token: one request at a time, so that no other request of the batch can change its tokens.

Random numbers depend on (seed, sample, number of the token) and are not a stream: a request that is preempted and resumed, or
decoded with other requests, draws the same numbers. Order of the steps, as in transformers: bias, penalties, temperature, top-k,
top-p, min-p.

Shape legend: V vocabulary, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_dmtd.inference.sampling_params import SamplingParams

_MASK64 = (1 << 64) - 1
#: Logits divided by a temperature below this may overflow; it is then so small that sampling is greedy.
_TINY_TEMPERATURE = 1e-20


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and its log probabilities if they were asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, log probability) of the likeliest tokens, the likeliest first."""


def choose(
    logits_V: torch.Tensor, params: SamplingParams, tokens: Sequence[int], prompt_length: int, *, sample: int = 0
) -> Choice:
    """The next token of one request.

    Args:
        logits_V: The model's logits; not changed.
        params: How to choose.
        tokens: Ids of the prompt and of the output so far.
        prompt_length: How many of them are the prompt.
        sample: Which of the prompt's n samples this is.
    """
    logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    adjusted_V = _adjusted(logits_V, params, tokens, prompt_length)
    scaled_V = None if params.temperature == 0 else adjusted_V / params.temperature
    if scaled_V is None or (params.temperature < _TINY_TEMPERATURE and not bool(scaled_V.max().isfinite())):
        token_id = int(adjusted_V.argmax())
    else:
        probability_V = truncated(scaled_V, params).double().softmax(-1)
        token_id = _drawn(probability_V, uniform(params.seed, sample, len(tokens) - prompt_length))
    if params.logprobs is None:
        return Choice(token_id)
    return described(logits_V[None], [token_id], num_top=params.logprobs)[0]


def described(logits_RV: torch.Tensor, token_ids: Sequence[int], *, num_top: int) -> list[Choice]:
    """Tokens, one per row, with their log probabilities and those of the `num_top` likeliest ones."""
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    logprob_RV = wide_RV.log_softmax(-1)
    chosen_R = logprob_RV.gather(1, torch.tensor(token_ids, device=logprob_RV.device)[:, None])[:, 0]
    best = logprob_RV.topk(num_top)
    tops = zip(best.indices.tolist(), best.values.tolist())
    return [Choice(token, logprob, tuple(zip(*top))) for token, logprob, top in zip(token_ids, chosen_R.tolist(), tops)]


def _adjusted(logits_V: torch.Tensor, params: SamplingParams, tokens: Sequence[int], prompt_length: int) -> torch.Tensor:
    """Bias and penalties."""
    counts_matter = params.presence_penalty != 0 or params.frequency_penalty != 0
    if not params.logit_bias and params.repetition_penalty == 1 and not counts_matter:
        return logits_V
    logits_V = logits_V.clone()
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=logits_V.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[biased] += bias
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)), device=logits_V.device)
        score = logits_V[seen]
        logits_V[seen] = torch.where(score < 0, score * params.repetition_penalty, score / params.repetition_penalty)
    if counts_matter and len(tokens) > prompt_length:
        seen, counts = torch.tensor(tokens[prompt_length:], device=logits_V.device).unique(return_counts=True)
        logits_V[seen] -= params.presence_penalty + params.frequency_penalty * counts
    return logits_V


def truncated(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits with -inf where top-k, top-p or min-p drop a token; the likeliest token always stays."""
    if params.top_k:
        kth = logits_V.topk(min(params.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, -math.inf)
    if params.top_p < 1:
        sorted_V, order_V = logits_V.sort(descending=True)
        probability_V = sorted_V.softmax(-1)
        dropped_V = probability_V.cumsum(-1) - probability_V >= params.top_p
        dropped_V[0] = False
        logits_V = logits_V.masked_fill(torch.zeros_like(dropped_V).scatter(0, order_V, dropped_V), -math.inf)
    if params.min_p > 0:
        logits_V = logits_V.masked_fill(logits_V < logits_V.max() + math.log(params.min_p), -math.inf)
    return logits_V


def _drawn(probability_V: torch.Tensor, number: float) -> int:
    """The token in whose interval of the cumulative probabilities `number` falls."""
    cumulative_V = probability_V.cumsum(-1)
    index = int(torch.searchsorted(cumulative_V, number * float(cumulative_V[-1]), right=True))
    possible = probability_V.nonzero()
    return min(index, int(possible[-1]))  # rounding may carry the product to the very end


def uniform(seed: int, sample: int, number: int) -> float:
    """A number in [0, 1) that depends on the three arguments only (SplitMix64, once for each)."""
    state = 0
    for value in (seed, sample, number):
        state = _mixed((state ^ (value & _MASK64)) + 0x9E3779B97F4A7C15)
    return (state >> 11) / (1 << 53)


def _mixed(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
