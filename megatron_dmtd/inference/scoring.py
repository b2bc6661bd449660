"""Log probabilities of given texts, through the same passes and caches as decoding.

By the training rules: the cycled forward over known tokens is the teacher-forced one (specification 1 to 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.engine import Engine
from megatron_dmtd.inference.planner import Chunk, plan_step
from megatron_dmtd.inference.pools import Tables


def score(engine: Engine, token_ids: Sequence[int]) -> list[float]:
    """Log probability of each token of a text but its first: entry i is that of token i + 1, predicted at position i.

    Raises:
        ConfigError: The engine is serving requests.
        DataError: The text is too short, too long, or has ids outside the vocabulary.
    """
    if engine.has_work:
        raise ConfigError(found="an engine with unfinished requests", required="an idle one", remedy="finish or cancel them")
    tokens = engine.check_prompt(token_ids, 0)
    if engine.prefix_index is not None:
        engine.prefix_index.clear()  # its pages may be needed, and scoring reads none of them
    tables, scores, start = Tables.empty(), [], 0
    try:
        while start < len(tokens):
            stop = engine.method.furthest_stop(start, min(len(tokens), start + _chunk_tokens(engine)))
            scores += _score_chunk(engine, tables, Chunk(0, tokens, start, stop))
            start = stop
    finally:
        engine.pools.release(tables)
    return scores


def _chunk_tokens(engine: Engine) -> int:
    """Whole cycles, so that no chunk is cut short."""
    return max(engine.method.cycle_start(engine.config.chunk_tokens), engine.method.cycle_length)


@torch.inference_mode()
def _score_chunk(engine: Engine, tables: Tables, chunk: Chunk) -> list[float]:
    engine.pools.grow(tables, engine.method.parallel_length(chunk.stop), chunk.stop)
    engine.runner.set_pages(chunk.slot, tables)
    plan = plan_step(engine.method, [chunk])
    logits_FV = engine.runner.run(plan, range(len(plan.sequential)))
    targets_F1 = torch.tensor(chunk.tokens[chunk.start + 1 : chunk.stop + 1], device=logits_FV.device)[:, None]
    wide_FV = logits_FV[: len(targets_F1)].to(torch.promote_types(logits_FV.dtype, torch.float32))
    return wide_FV.log_softmax(-1).gather(1, targets_F1)[:, 0].tolist()
