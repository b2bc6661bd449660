"""The border to text: tokenizers of model directories, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CheckpointError

#: A character may take this many tokens (one per byte), so a stop string lies within this many times its length.
TOKENS_PER_CHARACTER = 4


def load_tokenizer(directory: Path | None) -> Any:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: It has none.
    """
    from transformers import AutoTokenizer

    if directory is None or not any(directory.glob("tokenizer*")):
        raise CheckpointError(
            found=f"no tokenizer in {directory}",
            required="the tokenizer of the model, for text",
            remedy="copy it into the directory (tools/convert.py export --tokenizer), or give and take token ids",
        )
    return AutoTokenizer.from_pretrained(directory)


class StopStrings:
    """Notices stop strings in an output as it grows, looking at its end only."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self._window = TOKENS_PER_CHARACTER * max(len(string) for string in strings) + TOKENS_PER_CHARACTER

    def ends(self, output: Sequence[int]) -> bool:
        """Whether the end of `output` has completed a stop string."""
        tail = self._decode(output[-self._window :])
        return any(string in tail for string in self.strings)

    def text(self, output: Sequence[int]) -> str:
        """The text before the first stop string."""
        text = self._decode(output)
        found = [index for index in (text.find(string) for string in self.strings) if index >= 0]
        return text[: min(found)] if found else text

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)
