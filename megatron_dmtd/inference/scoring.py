"""Log probabilities of given texts, through the same passes and caches as decoding.

By the training rules: the cycled forward over known tokens is the teacher-forced one (docs/method.md,
sections 1 to 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dmtd.inference.engine import Engine


def score(engine: Engine, token_ids: Sequence[int], *, cache: object = None) -> list[float]:
    """See `Engine.score`."""
    return engine.score(token_ids, cache=cache)
