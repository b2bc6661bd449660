"""Small models of transformers' own classes, saved as their authors would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}


def model_of(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model whose random weights and biases spread its logits widely."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | fields)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 2 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 1 + 0.3 * noise)
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.sub_(1.0)
    return model


def saved(directory: Path, model: Any) -> Path:
    """The model as a directory."""
    model.save_pretrained(directory)
    return directory
