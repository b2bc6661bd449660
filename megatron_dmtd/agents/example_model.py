"""A small decoder of random weights with a chat template for tools, to try replays without a download.

What it writes means nothing; what is computed, cached and moved is what any model of its shape would compute, cache and move.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: ChatML, with calls and answers as Qwen writes them; earlier turns never change
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>' + call.function.name + ' ' + (call.function.arguments | string) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_MARKS = ("<|im_start|>", "<|im_end|>")


def write_example_model(
    folder: Path,
    record: Mapping[str, Any],
    *,
    variant: str | None = None,
    vocab_size: int = 2048,
    hidden_size: int = 128,
    num_layers: int = 4,
    max_length: int = 131_072,
) -> None:
    """Write a Qwen3-like model directory whose tokenizer is trained on the texts of a trajectory.

    Args:
        folder: Where; made if it is not there.
        record: A trajectory, as `example_trajectory` gives it.
        variant: One of Parallel DMTD's, with half of the layers parallel; None: an ordinary decoder.
        vocab_size: Tokens, besides two of the template.
        hidden_size: A multiple of 32.
        num_layers: An even number.
        max_length: Positions.

    Raises:
        OSError: Something cannot be written.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_dmtd.cycle import VARIANTS
    from megatron_dmtd.data.corpora.tokenizer import MASK_TOKEN, load_tokenizer, train_bpe
    from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    texts = [json.dumps(message, ensure_ascii=False).replace("\\n", "\n") for message in record["messages"]]
    train_bpe(texts, vocab_size=vocab_size, output_dir=folder, min_frequency=1)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in _MARKS])
    tokenizer.chat_template = TEMPLATE
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": max(1, hidden_size // 64),
        "head_dim": 32,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    torch.manual_seed(0)
    model: Any
    if variant is None:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=num_layers))
    else:
        history, block_attention = VARIANTS[variant]
        cycles: dict[str, Any] = {
            "mtp_horizon": 4,
            "num_parallel_layers": num_layers // 2,
            "num_sequential_layers": num_layers - num_layers // 2,
            "mask_token_id": tokenizer.convert_tokens_to_ids(MASK_TOKEN),
            "dmtd_history_mode": history,
            "dmtd_block_attention": block_attention,
        }
        model = DMTDQwen3ForCausalLM(DMTDQwen3Config(**shape, **cycles))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=1 / math.sqrt(weight.shape[-1]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
