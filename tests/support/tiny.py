"""Tiny models and corpora for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dmtd.config import (
    CheckpointConfig,
    Config,
    CycleConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)

VARIANTS = ("causal-norefresh", "causal-refresh", "bidirectional-norefresh", "bidirectional-refresh")
MASK, PAD, VOCAB = 99, 0, 100


def tiny_config(variant: str = "bidirectional-refresh", **sections: dict[str, Any]) -> Config:
    """A model of 4 layers, 2 of them parallel, that takes milliseconds a step; `sections` overrides fields by section."""
    config = Config(
        model=ModelConfig(
            num_layers=4,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCAB,
            max_position_embeddings=128,
            rope_theta=1e4,
            init_std=0.1,
        ),
        cycle=CycleConfig(variant=variant, num_parallel_layers=2, mask_token_id=MASK),  # type: ignore[arg-type]
        parallel=ParallelConfig(timeout_s=120),
        data=DataConfig(seq_length=32, pad_token_id=PAD),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, warmup_steps=2),
        training=TrainingConfig(
            steps=6, micro_batch_size=1, global_batch_size=4, eval_interval=0, eval_at_start=False, eval_batches=2
        ),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(interval=1, progress=False),
    )
    return with_settings(config, **sections)


def with_settings(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with some fields changed: `with_settings(c, training={"steps": 3})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def write_corpus(prefix: Path, *, num_documents: int, seed: int = 0) -> str:
    """An IndexedDataset of short documents with some structure to learn. Returns its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(num_documents):
        length = int(generator.integers(2, 70))
        builder.add_document(torch.from_numpy(1 + np.cumsum(generator.integers(0, 3, size=length)) % 90), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
