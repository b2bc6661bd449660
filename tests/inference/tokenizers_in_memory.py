"""Small tokenizers of the two kinds that decoders have, made in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["the quick brown fox jumps over the lazy dog", "né à l'été, où ça? naïve", "def f(x):\n    return x + 1\n"] * 4
SPECIAL = ["<|im_end|>", "<|im_start|>"]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's and Qwen's: BPE over bytes, some of whose tokens are parts of characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with a mark that is a space, but for the first one of a text; other characters are bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(TEXTS).replace(" ", "▁")) - set("éàçùï"))
    vocab = {name: index for index, name in enumerate([*names, *letters, "▁t", "he", "▁the", "▁q", "▁f", "ox", "▁fox"])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "q"), ("▁", "f"), ("o", "x"), ("▁f", "ox")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
