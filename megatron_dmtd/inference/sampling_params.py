"""Sampling parameters of a request, their types and ranges. No torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_dmtd.errors import ConfigError, shown

#: No use has larger numbers; products and quotients of them stay finite in fp32.
_LARGEST = 1e9


class ParameterError(ConfigError):
    """A value of one parameter that is impossible."""

    def __init__(self, name: str, value: object, required: str) -> None:
        self.name, self.value = name, value
        super().__init__(found=f"{name}={shown(value)}", required=required, remedy=f"change {name}")

    def renamed(self, name: str) -> ParameterError:
        """The same, where the parameter goes by another name."""
        return ParameterError(name, self.value, self.required)


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
    """Random seed: the same seed gives the same output."""
    n: int = 1
    """Independent samples of the prompt."""
    logprobs: int | None = None
    """Also give the log probability of each chosen token and of this many likeliest tokens, before all of the above."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but its first. Such a prompt is computed whole: it reuses no prefix."""
    stop_token_ids: tuple[int, ...] = ()
    """End after any of these, in addition to the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own stop tokens."""
    stop: tuple[str, ...] = ()
    """End as soon as the output's text holds any of these; the text ends before it. One may be, or name, a special token."""
    detokenize: bool = False
    """Also give the output's text, whole and piece by piece; stop strings imply it."""
    num_loops: int | tuple[int, ...] | None = None
    """How often the looped layers of such a decoder run; None: as often as the engine says. With the cache mode `last_loop` also
    several numbers: for the prompt, then for each token of the output, the last one for all that remain."""

    def check(self, vocab_size: int) -> None:
        """Accept the values, or raise `ConfigError` naming the first that is impossible."""
        self._check_types()
        in_vocabulary, in_range = f"ids from 0 to {vocab_size - 1}", f"a number from {-_LARGEST:g} to {_LARGEST:g}"
        checks = (
            ("temperature", 0 <= self.temperature <= _LARGEST, f"a number from 0 to {_LARGEST:g}"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 1 / _LARGEST <= self.repetition_penalty <= _LARGEST, f"above 0, at most {_LARGEST:g}"),
            ("presence_penalty", abs(self.presence_penalty) <= _LARGEST, in_range),
            ("frequency_penalty", abs(self.frequency_penalty) <= _LARGEST, in_range),
            ("logit_bias", all(0 <= token < vocab_size for token in self.logit_bias), in_vocabulary),
            ("logit_bias", all(_is_possible_bias(bias) for bias in self.logit_bias.values()), f"-inf, or {in_range}"),
            ("logit_bias", not self._forbids_everything(vocab_size), "at least one token that is not forbidden"),
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
                raise ParameterError(name, getattr(self, name), required)

    def _forbids_everything(self, vocab_size: int) -> bool:
        return len(self.logit_bias) == vocab_size and all(bias == -math.inf for bias in self.logit_bias.values())

    def _check_types(self) -> None:
        """Refuse by name what would break a step that other requests share, or would be read as something else."""
        for name, is_right, required in _TYPES:
            if not is_right(getattr(self, name)):
                raise ParameterError(name, getattr(self, name), required)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest logit and nothing else is asked for."""
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


def _is_possible_bias(bias: float) -> bool:
    return bias == -math.inf or abs(bias) <= _LARGEST


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
