"""The border to text: tokenizers of model directories, pieces of text as tokens come, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CheckpointError, DataError
from megatron_dmtd.inference.weights import read_config

#: A character may take this many tokens (one per byte), so a stop string lies within this many times its length.
TOKENS_PER_CHARACTER = 4


def load_tokenizer(directory: Path | None) -> Any:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: The directory is no model's, or has no tokenizer, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    if directory is not None:
        read_config(directory)  # transformers reads it too, and would blame the tokenizer
    if directory is None or not any(directory.glob("tokenizer*")):
        raise CheckpointError(
            found=f"no tokenizer in {directory}",
            required="the tokenizer of the model, for text",
            remedy="copy it into the directory (tools/convert.py export --tokenizer), or give and take token ids",
        )
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # whatever the class of tokenizer makes of a damaged file
        raise CheckpointError(
            found=f"a tokenizer in {directory} that transformers cannot read: {type(error).__name__}: {error}",
            required="a whole tokenizer",
            remedy="copy it into the directory again",
        ) from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt.

    Raises:
        DataError: The text is not Unicode: bytes of another encoding on the command line, say.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            found=f"a prompt that is not valid Unicode at character {error.start}: {text!r}",
            required="UTF-8",
            remedy="convert the prompt, or read it from a file in UTF-8",
        ) from error
    return list(tokenizer(text)["input_ids"])


class TextPieces:
    """The text of an output as it grows, in pieces that will not change any more.

    A character may take several tokens, and a token's text may depend on the one before it. So each piece is the difference of
    two decodings from a token whose text has been given already; both are short, however long the output is.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = ()) -> None:
        """`prompt_ids` are what the output follows: the text of its first token may depend on their last ones."""
        self.tokenizer = tokenizer
        self._ids = list(prompt_ids[-TOKENS_PER_CHARACTER:])
        self._start = 0
        self._given = len(self._ids)

    def add(self, token_id: int) -> str:
        """The text that has become certain with one more token; empty inside a character."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text

    def rest(self) -> str:
        """What is left at the end of the output: a character that was not completed."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self.tokenizer.decode(self._ids[self._start : self._given], skip_special_tokens=True)
        return self.tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)[len(known) :]


class OutputText:
    """The text of an output as it grows, up to its first stop string: what may be the beginning of one is held back."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._pieces, self._stop = TextPieces(tokenizer, prompt_ids), tuple(stop)
        self._held_back = max((len(string) - 1 for string in self._stop), default=0)
        self._text = ""
        self._num_given = 0

    @property
    def whole(self) -> str:
        """All text so far, with what is held back."""
        return self._text

    @property
    def num_characters(self) -> int:
        """Of all text so far."""
        return len(self._text)

    def add(self, token_id: int, *, is_last: bool) -> str:
        """What has become certain with one more token."""
        self._text += self._pieces.add(token_id)
        certain = len(self._text) - self._held_back
        if is_last:
            self._text += self._pieces.rest()
            found = [index for index in map(self._text.find, self._stop) if index >= 0]
            certain = min(found, default=len(self._text))
        piece = self._text[self._num_given : max(certain, self._num_given)]
        self._num_given += len(piece)
        return piece


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
