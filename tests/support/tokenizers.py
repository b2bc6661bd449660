"""Tokenizers for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, train_bpe

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


#: post-processors of decoders' tokenizers, with PAD in the place of BOS
PROCESSORS = {
    "none": None,
    "bos": processors.TemplateProcessing(single="<|pad|> $A", pair="<|pad|> $A <|pad|> $B", special_tokens=[("<|pad|>", 1)]),
    "both": processors.TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=[("<|pad|>", 1), ("<|endoftext|>", 0)]
    ),
    "byte-level": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)]),
        ]
    ),
}


def with_processor(tokenizer_json: str, processor: object) -> str:
    """The tokenizer with another post-processor."""
    backend = Tokenizer.from_str(tokenizer_json)
    if processor is not None:
        backend.post_processor = processor
    return backend.to_str()


def chat_tokenizer(folder: Path, texts: Sequence[str], *, vocab_size: int) -> str:
    """A small BPE with a chat template, in `folder`; returns the folder's name."""
    train_bpe(texts, vocab_size=vocab_size, output_dir=folder, min_frequency=1)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)
