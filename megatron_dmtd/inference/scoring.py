"""Log probabilities of given texts, through the same passes and caches as decoding.

By the training rules: the cycled forward over known tokens is the teacher-forced one (docs/method.md,
sections 1 to 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dmtd.inference.engine import Engine
from megatron_dmtd.inference.sampling_params import SamplingParams


def score(engine: Engine, token_ids: Sequence[int]) -> list[float]:
    """Log probability of each token of a text but its first: entry i is that of token i + 1, predicted at position i.

    Raises `DataError` if the text is empty, too long, or has ids outside the vocabulary.
    """
    (event,) = engine.stream(token_ids, max_new_tokens=0, params=SamplingParams(prompt_logprobs=0))
    assert event.completion is not None
    return [choice.logprob for choice in event.completion.prompt_logprobs if choice.logprob is not None]
