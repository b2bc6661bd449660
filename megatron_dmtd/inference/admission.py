"""Checks of a request before it is queued: ids of the vocabulary, a length that fits, valid parameters.

Numbers only: nothing here knows a running engine.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable

from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.inference.sampling_params import ParameterError, SamplingParams


def check_params(params: object, vocab_size: int) -> None:
    """Accept sampling parameters, or raise `ConfigError`."""
    if not isinstance(params, SamplingParams):
        raise ConfigError(
            found=f"params of type {type(params).__name__}",
            required="SamplingParams",
            remedy="write for example params=SamplingParams(temperature=0.8)",
        )
    params.check(vocab_size)


def check_length_cap(max_new_tokens: object, params: SamplingParams) -> None:
    """Accept the length cap of an output, or raise `ConfigError`."""
    if not isinstance(max_new_tokens, numbers.Integral) or max_new_tokens < (params.prompt_logprobs is None):
        required = "an integer of at least 1, or 0 for the log probabilities of a prompt"
        raise ParameterError("max_new_tokens", max_new_tokens, required)


def checked_prompt(prompt_ids: object, max_new_tokens: int, *, vocab_size: int, max_length: int) -> list[int]:
    """The prompt as a list. Raises `DataError` unless it is a list of ids of the vocabulary, neither empty nor too long."""
    prompt = checked_ids(prompt_ids, vocab_size)
    check_length(len(prompt), max_new_tokens, max_length)
    return prompt


def checked_ids(prompt_ids: object, vocab_size: int) -> list[int]:
    """The prompt as a list. Raises `DataError` unless it is a list of ids of the vocabulary, not empty."""
    prompt = token_ids_of(prompt_ids)
    if not prompt:
        raise DataError(found="an empty prompt", required="at least one token", remedy="start with a token, such as bos")
    outside = sorted({token for token in prompt if not 0 <= token < vocab_size})
    if outside:
        raise DataError(
            found=f"token ids {outside[:5]} in a prompt",
            required=f"ids from 0 to {vocab_size - 1}",
            remedy="tokenize with the model's own tokenizer",
        )
    return prompt


def check_length(prompt_length: int, max_new_tokens: int, max_length: int, *, name: str = "max_new_tokens") -> None:
    """Accept a prompt and its output, or raise `DataError`. `name`: the caller's name for the length cap of the output."""
    if prompt_length + max_new_tokens > max_length:
        raise DataError(
            found=f"a prompt of {prompt_length} tokens and {name}={max_new_tokens}",
            required=f"at most {max_length} tokens together",
            remedy="shorten them, or raise max_length or cache_tokens of the engine",
        )


def token_ids_of(prompt_ids: object) -> list[int]:
    """A prompt's ids. Raises `DataError` for a text, a number, or ids that are not integers: nothing is guessed."""
    remedy = "tokenize the text, and pass a list of such lists"
    if isinstance(prompt_ids, str | bytes) or not isinstance(prompt_ids, Iterable):
        raise DataError(found=f"a prompt of type {type(prompt_ids).__name__}", required="a list of token ids", remedy=remedy)
    tokens = list(prompt_ids)
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise DataError(found=f"a prompt of {tokens[:5]!r}", required="a list of token ids, integers", remedy=remedy) from error
