"""Tiny random models whose logits spread widely, so that a wrong mask or a wrong cache shows."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM

VOCABULARY, MASK_ID = 61, 60
#: what an ordinary decoder's configuration does not have
DMTD_FIELDS = (
    "mtp_horizon",
    "num_parallel_layers",
    "num_sequential_layers",
    "mask_token_id",
    "dmtd_history_mode",
    "dmtd_block_attention",
    "qk_norm",
    "attention_output_bias",
)
NAMES = sorted(VARIANTS)
each_variant = pytest.mark.parametrize("variant", NAMES)


def tiny_config(variant: str, **changes) -> DMTDQwen3Config:
    history, block_attention = VARIANTS[variant]
    fields = {
        "mtp_horizon": 4,
        "num_parallel_layers": 2,
        "num_sequential_layers": 2,
        "mask_token_id": MASK_ID,
        "dmtd_history_mode": history,
        "dmtd_block_attention": block_attention,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
    }
    return DMTDQwen3Config(**{**fields, **changes})


def tiny_model(variant: str, *, dtype: torch.dtype = torch.float64, **changes) -> DMTDQwen3ForCausalLM:
    """The same weights for every variant."""
    model = DMTDQwen3ForCausalLM(tiny_config(variant, **changes)).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else noise * 2 / math.sqrt(weight.shape[-1]))
    return model.to(dtype)


def random_ids(*shape: int, seed: int = 3) -> torch.Tensor:
    """Ids that are never the MASK id."""
    return torch.randint(0, MASK_ID, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decoded_logits(model: DMTDQwen3ForCausalLM, ids_BW: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Logits of every column: a prompt, then one column at a time."""
    output = model(ids_BW[:, :prompt_length], use_cache=True)
    logits = [output.logits]
    for column in range(prompt_length, ids_BW.shape[1]):
        output = model(ids_BW[:, column : column + 1], cache=output.cache)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def vanilla_decoder(model: DMTDQwen3ForCausalLM):
    """The same weights in transformers' own Qwen3, or Llama without q and k norms."""
    fields = {**model.config.to_dict(), "attn_implementation": "eager"}
    for name in ("model_type", "architectures", "transformers_version", "dtype", *DMTD_FIELDS):
        fields.pop(name, None)
    if model.config.qk_norm:
        vanilla = Qwen3ForCausalLM(Qwen3Config(**fields))
    else:
        for name in ("layer_types", "max_window_layers", "use_sliding_window", "sliding_window"):
            fields.pop(name, None)
        vanilla = LlamaForCausalLM(LlamaConfig(**fields))
    vanilla.load_state_dict(model.state_dict())
    return vanilla.to(model.dtype).eval()
