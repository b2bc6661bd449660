"""What a tokenizer puts around a text, seen from outside: by encoding one."""

from __future__ import annotations

from collections.abc import Callable

from megatron_dmtd.errors import DataError

#: the ids of a text; with special tokens if the second argument is true
Encode = Callable[[str, bool], list[int]]
#: stands for any text: what a tokenizer adds does not depend on it
_TEXT = "a"


def added_ids(encode: Encode) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text."""
    plain, whole = encode(_TEXT, False), encode(_TEXT, True)
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return whole[:begin], whole[begin + len(plain) :]
    raise DataError(
        found=f"a tokenizer that turns {_TEXT!r} into {plain}, and with special tokens into {whole}",
        required="one that puts special tokens before or after the ids of a text",
        remedy="check its post_processor in tokenizer.json",
    )
