"""Small Hugging Face directories for tests: random weights of any shape, and a tokenizer that knows real text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.weights.megatron_names import rules
from megatron_dmtd.weights.specs import TensorSpec

VANILLA = CycleConfig(variant="vanilla")


def small_model(**changes) -> ModelConfig:
    """Sizes with a padded vocabulary, several groups of heads and norms on them."""
    shape = {
        "num_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
    }
    return ModelConfig(**(shape | changes))


def random_hf_directory(
    directory: Path,
    model: ModelConfig,
    *,
    cycle: CycleConfig = VANILLA,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer_dir: Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """A directory of random weights, made one tensor at a time, so that it may be larger than memory."""
    specs = {name: TensorSpec(shape, dtype) for rule in rules(decoder_of(model)) for name, shape in rule.hf}
    generator = torch.Generator().manual_seed(seed)

    def tensors():
        for name, spec in specs.items():
            noise = _noise(spec, generator)
            yield name, noise.mul_(0.2).add_(1) if len(spec.shape) == 1 else noise.mul_(spec.shape[-1] ** -0.5)

    fields = write_fields(ModelDescription(model=model, cycle=cycle))
    write_hf_directory(
        directory, fields=fields, specs=specs, tensors=tensors(), tokenizer_dir=tokenizer_dir, shard_bytes=shard_bytes
    )
    return directory


def _noise(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Normal noise. In large tensors it repeats after a prime number of elements, so that no two rows are equal."""
    num_elements = math.prod(spec.shape)
    block = torch.empty(min(num_elements, 4_194_301), dtype=spec.dtype).normal_(generator=generator)
    return block.repeat(-(-num_elements // len(block)))[:num_elements].reshape(spec.shape)


def save_tokenizer(directory: Path, *, vocab_size: int = 300) -> Path:
    """A byte-level BPE with EOS 0, PAD 1 and MASK 2, trained on a few sentences."""
    from megatron_dmtd.data.corpora.tokenizer import train_bpe

    text = ["A cycle begins with its head, and the parallel layers look ahead of it.", "The capital of France is Paris."]
    train_bpe(text, vocab_size=vocab_size, output_dir=directory, min_frequency=1)
    return directory


def change_fields(directory: Path, **changes) -> None:
    """Change fields of a `config.json`; None removes one."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
