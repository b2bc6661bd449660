"""From logits to a token: one request at a time, so that no other request of the batch can change its tokens.

Randomness is a function of (seed, sample, number of the token), not a stream: a request that is preempted and resumed, or decoded
in other company, draws the same numbers. Order of the steps, as in transformers: bias, penalties, temperature, top-k, top-p,
min-p.

Shape legend: V vocabulary, K rows.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_dmtd.errors import ConfigError

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens, and when it ends."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output are divided (if positive) or multiplied (if negative) by it."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """The same, as many times as the token is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits, by token id; -inf forbids a token."""
    seed: int = 0
    """Of the random numbers."""
    n: int = 1
    """Independent samples of the prompt."""
    logprobs: int | None = None
    """Also give the log probability of each chosen token and of this many likeliest tokens, before all of the above."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but its first. Such a prompt is computed whole: it reuses no prefix."""
    stop_token_ids: tuple[int, ...] = ()
    """End after any of these, besides the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own stop tokens."""
    stop: tuple[str, ...] = ()
    """End as soon as the output's text holds any of these; the text ends before it. One may be, or name, a special token."""
    detokenize: bool = False
    """Also give the output's text, whole and piece by piece; stop strings imply it."""

    def check(self, vocab_size: int) -> None:
        """Accept the values, or raise `ConfigError` naming the first that is impossible."""
        self._check_types()
        in_vocabulary = f"ids from 0 to {vocab_size - 1}"
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "a finite number, at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("logit_bias", all(0 <= token < vocab_size for token in self.logit_bias), in_vocabulary),
            ("logit_bias", all(bias < math.inf for bias in self.logit_bias.values()), "numbers below infinity"),
            ("n", self.n >= 1, "at least 1"),
            *(
                (name, value is None or 0 <= value <= vocab_size, f"from 0 to {vocab_size}")
                for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            ),
            ("stop_token_ids", all(0 <= token < vocab_size for token in self.stop_token_ids), in_vocabulary),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of strings that are not empty"),
        )
        for name, is_fine, required in checks:
            if not is_fine:
                raise ConfigError(found=f"{name}={getattr(self, name)!r}", required=required, remedy=f"change {name}")

    def _check_types(self) -> None:
        """Refuse by name what would break a step in which other requests take part, or be read as something else."""
        for name, is_right, required in _TYPES:
            if not is_right(getattr(self, name)):
                raise ConfigError(found=f"{name}={getattr(self, name)!r}", required=required, remedy=f"change {name}")

    @property
    def is_plain_greedy(self) -> bool:
        """The token is the largest logit and nothing more is asked for."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and self.logprobs is None
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_integer(token) and _is_number(bias) for token, bias in value.items())


def _is_list(of: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple | set | frozenset) and all(map(of, value))


#: type of each parameter, and how to say it
_TYPES: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    *((name, _is_integer, "an integer") for name in ("top_k", "seed", "n")),
    *(
        (name, lambda value: value is None or _is_integer(value), "an integer or None")
        for name in ("logprobs", "prompt_logprobs")
    ),
    *((name, lambda value: isinstance(value, bool), "True or False") for name in ("ignore_eos", "detokenize")),
    *((name, _is_number, "a number") for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *((name, _is_number, "a number") for name in ("presence_penalty", "frequency_penalty")),
    ("logit_bias", _is_bias, "numbers by token id"),
    ("stop_token_ids", _is_list(_is_integer), "a tuple of token ids"),
    ("stop", _is_list(lambda value: isinstance(value, str)), "a tuple of strings that are not empty"),
)


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
    if params.temperature == 0:
        token_id = int(adjusted_V.argmax())
    else:
        probability_V = truncated(adjusted_V / params.temperature, params).double().softmax(-1)
        token_id = _drawn(probability_V, uniform(params.seed, sample, len(tokens) - prompt_length))
    if params.logprobs is None:
        return Choice(token_id)
    return described(logits_V[None], [token_id], num_top=params.logprobs)[0]


def described(logits_KV: torch.Tensor, token_ids: Sequence[int], *, num_top: int) -> list[Choice]:
    """Tokens, one per row, with their log probabilities and those of the `num_top` likeliest ones."""
    wide_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
    logprob_KV = wide_KV.log_softmax(-1)
    chosen_K = logprob_KV.gather(1, torch.tensor(token_ids, device=logprob_KV.device)[:, None])[:, 0]
    best = logprob_KV.topk(num_top)
    tops = zip(best.indices.tolist(), best.values.tolist())
    return [Choice(token, logprob, tuple(zip(*top))) for token, logprob, top in zip(token_ids, chosen_K.tolist(), tops)]


def _adjusted(logits_V: torch.Tensor, params: SamplingParams, tokens: Sequence[int], prompt_length: int) -> torch.Tensor:
    """Bias and penalties."""
    counts_matter = params.presence_penalty != 0 or params.frequency_penalty != 0
    if not params.logit_bias and params.repetition_penalty == 1 and not counts_matter:
        return logits_V
    logits_V = logits_V.clone()
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
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
    """The token in whose stretch of the cumulative probabilities `number` falls."""
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
