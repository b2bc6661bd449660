"""Tiny exports on disk, and what Hugging Face's `generate` makes of the same weights."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_dmtd.inference import Engine, EngineConfig
from tests.hf.tiny import tiny_model, vanilla_decoder

NAMES = ("causal-norefresh", "causal-refresh", "bidirectional-norefresh", "bidirectional-refresh")
KINDS = (*NAMES, "vanilla")
PENALTY = 5.0
SMALL = EngineConfig(max_batch=4, max_length=128, cache_tokens=512, chunk_tokens=24)


class Pair:
    """One model as a directory for the engine, and in transformers."""

    def __init__(self, folder: Path, kind: str, **changes) -> None:
        self.kind, self.directory = kind, folder / kind
        source = tiny_model("causal-refresh" if kind == "vanilla" else kind, **changes)
        self.slow = vanilla_decoder(source) if kind == "vanilla" else source
        self.slow.save_pretrained(self.directory)
        self._greedy: dict[tuple, list[int]] = {}

    def engine(self, config: EngineConfig = SMALL, **options) -> Engine:
        """In float64, where no rounding can turn a choice."""
        return Engine(self.directory, config, **{"dtype": "float64", "device": "cpu", **options})

    def greedy(self, prompt: list[int], max_new_tokens: int, *, repetition_penalty: float = PENALTY) -> list[int]:
        """Tokens of transformers' `generate`, without an end token. The penalty keeps random models from repeating themselves."""
        key = (tuple(prompt), max_new_tokens, repetition_penalty)
        if key not in self._greedy:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            options["repetition_penalty"] = repetition_penalty
            self._greedy[key] = self.slow.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        return self._greedy[key]
