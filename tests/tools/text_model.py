"""A tiny export with a tokenizer of bytes, for the commands that take text."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.hf.tiny import tiny_model


def save_text_model(folder: Path, variant: str = "bidirectional-refresh") -> Path:
    """Ids 0 to 255 are bytes, 256 ends a text, 257 is MASK."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", mask_token="<mask>")
    model = tiny_model(variant, vocab_size=258, mask_token_id=257)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
