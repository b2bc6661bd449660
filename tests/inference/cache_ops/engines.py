"""Engines on the oracle's weights for requests with cache operations, and the comparison with the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_dmtd.inference import Completion, Engine, EngineConfig, SamplingParams
from tests.inference.oracle_models import model_of, yarn
from tests.oracles.cache_operations import edited_logits
from tests.oracles.parallel_dmtd import FOUR_VARIANTS, Shape, random_weights

ORDINARY = {
    "qwen3": Shape(num_layers=2, num_parallel_layers=0),
    "llama, yarn": Shape(num_layers=2, num_parallel_layers=0, qk_norm=False, tie_word_embeddings=False, **yarn()),
    "windows": Shape(num_layers=3, num_parallel_layers=0, qk_norm=False, windows=(5, None, 7)),
}
CYCLED = {
    "threes": Shape(num_layers=3, num_parallel_layers=2, cycle_length=3),
    "fours, windows": Shape(num_layers=3, num_parallel_layers=1, windows=(5, None, 6)),
}
#: (shape, history, block attention) by name.
MODELS = {name: (shape, "", "") for name, shape in ORDINARY.items()}
MODELS |= {f"{'-'.join(kind)}, {name}": (shape, *kind) for kind in FOUR_VARIANTS for name, shape in CYCLED.items()}
#: The same with sizes that native kernels take.
NATIVE_MODELS = {name: (replace(shape, head_dim=16), *kind) for name, (shape, *kind) in MODELS.items() if not shape.frequencies}
#: In float64, of log probabilities.
CLOSE = 1e-11


class Checked:
    """An engine whose every answer is compared with the oracle."""

    def __init__(self, name: str, *, dtype: torch.dtype = torch.float64, is_native: bool = False, **settings) -> None:
        """`is_native`: through native kernels, in fp32."""
        self.shape, *self.kind = (NATIVE_MODELS if is_native else MODELS)[name]
        if is_native:
            dtype, settings = torch.float32, {"page_size": 48, "kernels": "native", **settings}
        self.weights = random_weights(self.shape, seed=1)
        self.cycle_length = self.shape.cycle_length if self.shape.num_parallel_layers else 1
        model = model_of(self.shape, self.weights, *self.kind, dtype=dtype)
        self.engine = Engine(model, EngineConfig(**{"max_batch": 3, "page_size": 12, "cache_tokens": 1200, **settings}))

    def expected(self, tokens: list[int], program: list | None) -> torch.Tensor:
        """Log probabilities `[N, V]` by the oracle."""
        names = dict(zip(("history", "block_attention"), self.kind))
        return edited_logits(self.weights, self.shape, tokens, program or [], **names).log_softmax(-1)

    def generate(self, requests: list[tuple[list[int], list | None]], count: int, *, atol: float = CLOSE) -> list[Completion]:
        """Completions, after checks of their log probabilities, of the usage's law and of the engine's books."""
        params = SamplingParams(ignore_eos=True, logprobs=0)
        prompts, programs = zip(*requests)
        done = self.engine.generate(prompts, max_new_tokens=count, params=params, cache=programs)
        for (prompt, program), one in zip(requests, done):
            assert one.finish_reason == "length", one.refusal
            tokens = [*prompt, *one.token_ids]
            rows = self.expected(tokens, program)[len(prompt) - 1 : -1]
            expected = rows.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            found = torch.tensor([choice.logprob for choice in one.logprobs], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
            if atol == CLOSE:
                assert list(one.token_ids) == rows.argmax(-1).tolist()
            usage = one.usage
            parts = usage.cached_tokens, usage.repos_tokens, usage.drop_skipped_tokens, usage.prefill_tokens
            assert sum(parts) <= usage.prompt_tokens == len(prompt)
        self.engine.check_integrity()
        self.engine.tree.check_integrity()
        return done

    def score(self, tokens: list[int], program: list) -> None:
        """Check the log probabilities of a text."""
        expected = self.expected(tokens, program)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        found = torch.tensor(self.engine.score(tokens, cache=program), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)
