"""One sample of one request while it is decoded, its events, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.inference.cache_ops.usage import Usage
from megatron_dmtd.inference.detokenizer import Detokenizer
from megatron_dmtd.inference.sampler import Choice
from megatron_dmtd.inference.sampling_params import SamplingParams
from megatron_dmtd.inference.scheduler import Sequence

FinishReason = Literal["stop", "length", "cancelled", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The result of one request, or of one of its n samples."""

    request_id: int
    sample: int
    """0 to n - 1."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The output; a stop token that ended it is its last one."""
    finish_reason: FinishReason
    text: str | None = None
    """The output's text, without the stop string, if text or stop strings were asked for."""
    logprobs: tuple[Choice, ...] = ()
    """One per token of the output, if asked for."""
    prompt_logprobs: tuple[Choice, ...] = ()
    """One per token of the prompt but its first, if asked for; of the first of n samples."""
    refusal: DMTDError | None = None
    """Why the request was refused."""
    weights_versions: tuple[int, ...] = ()
    """For each token of the output, the version of the weights that it was sampled with."""
    usage: Usage | None = None
    """Which of the prompt's tokens were computed, and which were cached; None for a refused request."""


@dataclass(kw_only=True, slots=True)
class Request:
    """One sample being decoded."""

    request_id: int
    sample: int
    prompt_length: int
    max_new_tokens: int
    params: SamplingParams
    sequence: Sequence
    stop_ids: frozenset[int]
    text: Detokenizer | None
    """Detokenizer of the output, if its text is asked for."""
    logprobs: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[Choice] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        """Leading rows of the prompt whose logits give the likelihood of the prompt's next token, if that is asked for."""
        return 0 if self.sequence.reuses_prefix else self.prompt_length - 1

    @property
    def usage(self) -> Usage:
        """What of the prompt had to be computed when the request was first admitted."""
        if self.sequence.edited is not None:
            return self.sequence.edited.usage or Usage(prompt_tokens=self.prompt_length, prefill_tokens=0)
        reused = self.sequence.num_reused
        return Usage(prompt_tokens=self.prompt_length, cached_tokens=reused, prefill_tokens=self.prompt_length - reused)

    @property
    def output(self) -> list[int]:
        """Ids chosen so far."""
        return self.sequence.tokens[self.prompt_length :]

    @property
    def num_output(self) -> int:
        """Their number."""
        return len(self.sequence.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Event:
    """A new token of a sample; the last one comes with its completion."""

    request_id: int
    sample: int
    choice: Choice | None
    """None if no token was asked for."""
    completion: Completion | None
    text: str = ""
    """The output's text that has become certain with it, if text was asked for; all pieces together are the completion's text."""
    text_offset: int = 0
    """Characters of the output's text before the token."""

    @property
    def token_id(self) -> int:
        """The token."""
        assert self.choice is not None, "no token was asked for"
        return self.choice.token_id
