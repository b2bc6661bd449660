"""Tokenizers for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, train_bpe

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(folder: Path, texts: Sequence[str], *, vocab_size: int) -> str:
    """A small BPE with a chat template, in `folder`; returns the folder's name."""
    train_bpe(texts, vocab_size=vocab_size, output_dir=folder, min_frequency=1)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)
