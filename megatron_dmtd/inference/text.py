"""The boundary to text: tokenizers of model directories, and prompts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CheckpointError, DataError
from megatron_dmtd.inference.loading import read_model_directory
from megatron_dmtd.infra.special_tokens import added_ids


def load_tokenizer(directory: Path | None) -> Any:
    """The tokenizer of a model directory.

    Raises:
        ModelError: The directory is not a model's.
        CheckpointError: There is no directory, or it has no tokenizer, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    import megatron_dmtd.hf  # noqa: F401 - transformers asks for the class of the configuration

    if directory is not None:
        read_model_directory(directory)  # transformers reads it too, and would blame the tokenizer
    if directory is None or not any(directory.glob("tokenizer*")):
        raise CheckpointError(
            found=f"no tokenizer in {directory}",
            required="the tokenizer of the model, for text",
            remedy="copy it into the directory (tools/convert.py export --tokenizer), or give and take token ids",
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever the class of tokenizer raises for a damaged file
        raise CheckpointError(
            found=f"a tokenizer in {directory} that transformers cannot read: {type(error).__name__}: {error}",
            required="a whole tokenizer",
            remedy="copy it into the directory again",
        ) from error


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: The model's.
        text: The prompt.
        add_special_tokens: Put before it what the tokenizer puts there, BOS or nothing; a chat template has done so already. An
            end of text that a tokenizer appends is left out: nothing would follow it.

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
    ids = _ids(tokenizer, text, add_special_tokens=add_special_tokens)
    if add_special_tokens and ids and ids[-1] == tokenizer.eos_token_id:
        _, appended = added_ids(lambda text, added: _ids(tokenizer, text, add_special_tokens=added))
        ids = ids[: len(ids) - len(appended)]
    return ids


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    encoded = tokenizer(
        text, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return list(encoded["input_ids"])
