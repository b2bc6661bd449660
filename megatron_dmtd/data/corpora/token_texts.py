"""The text that each token of a sequence contributes, so that the parts, one after the other, are the text of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: tokens before one that decide its text: whether a word begins there
_CONTEXT = 4
#: tokens that one character may need, in UTF-8
_MOST_BYTES = 4
_INCOMPLETE = "\ufffd"


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per token. Of tokens that share a character, the last has it and the others are empty."""
    texts, begin = [""] * len(ids), 0
    for end in range(1, len(ids) + 1):
        text = _added(tokenizer, ids[max(0, begin - _CONTEXT) : begin], ids[begin:end])
        if text.endswith(_INCOMPLETE) and end - begin < _MOST_BYTES and end < len(ids):
            continue
        texts[end - 1], begin = text, end
    return texts


def _added(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """What `ids` add to the text of the tokens before them."""
    context, whole = _decoded(tokenizer, before), _decoded(tokenizer, [*before, *ids])
    return whole[len(context) :] if whole.startswith(context) else _decoded(tokenizer, ids)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
