"""Tokenizers: loading, encoding text so that it cannot produce control tokens, and training a byte-level BPE.

A text may contain the characters `<|endoftext|>` or `<|mask|>`, as web pages and source files about language models do. They stay
text. If they became control ids, a document would end in the middle, or contain MASK, which stands for a token not yet known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.digests import sha256_of_file
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
MASK_TOKEN = "<|mask|>"
_CONTROL_TOKENS = (EOS_TOKEN, PAD_TOKEN, MASK_TOKEN)  # ids 0, 1, 2 of a tokenizer trained here
#: all bytes and the control tokens
SMALLEST_VOCABULARY = 256 + len(_CONTROL_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlIds:
    """Ids that do not stand for text."""

    eos: int
    """End of a document."""
    pad: int
    """Padding; may equal `eos`."""
    mask: int
    """A token not yet known. May lie beyond the tokenizer's own ids."""


#: key of tokenizer_config.json: digest of the tokenizer.json from which an export's was made by changing what begins texts
MADE_FROM = "dmtd_made_from_sha256"
_REQUIRED = "a folder with a Hugging Face fast tokenizer (tokenizer.json, tokenizer_config.json)"


_DAMAGED = Refusal(DataError, required="a JSON object", remedy="copy the folder again")


def _tokenizer_file(directory: str | Path) -> Path:
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise DataError(found=f"no file {file}", required=_REQUIRED, remedy="check the path, or run tools/train_tokenizer.py")
    return file


def _register_own_model(directory: Path) -> None:
    """A model's configuration is loaded before its tokenizer, with a warning about those that transformers does not know."""
    file = directory / "config.json"
    if not file.is_file():
        return
    from megatron_dmtd.families.dmtd import DMTD

    if f'"{DMTD.model_type}"' in file.read_text(encoding="utf-8", errors="replace"):
        import megatron_dmtd.hf  # noqa: F401 - seconds of import


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `directory`. Raises `DataError` if there is none, or it has no EOS."""
    file = _tokenizer_file(directory)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds of import

    _register_own_model(Path(directory))
    try:
        # A tokenizer is data. Without False, transformers 5 asks at a terminal whether to run the model's code next to it.
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise DataError(found=f"{file}: {error}", required=_REQUIRED, remedy="make or copy the folder again") from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            found=f"the tokenizer in {directory} has no EOS token",
            required="an EOS token, which ends each document",
            remedy="set eos_token in its tokenizer_config.json",
        )
    assert isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer)
    return tokenizer


def tokenizer_sha256(directory: str | Path) -> str:
    """Digest of the folder's `tokenizer.json`, which a corpus's manifest records. Raises `DataError` if there is no such file.

    An export whose tokenizer had to learn how to begin texts has that of the file that it was made from.
    """
    file = _tokenizer_file(directory)
    settings = file.with_name("tokenizer_config.json")
    made_from = read_object(settings, _DAMAGED).get(MADE_FROM) if settings.is_file() else None
    return str(made_from) if made_from else sha256_of_file(file)


def control_ids(tokenizer: PreTrainedTokenizerFast, *, mask_token_id: int | None = None) -> ControlIds:
    """The control ids of a tokenizer. PAD is EOS if it has none of its own; `mask_token_id` overrides its MASK.

    Raises `DataError` if there is no MASK, or it is EOS or an ordinary token.
    """
    mask = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
    remedy = "give the id of a special token that no text needs (--mask-token-id; 151660 for Qwen3)"
    if mask is None:
        raise DataError(found="a tokenizer without a MASK token", required="a MASK token", remedy=remedy)
    required = "an id of its own, which no text holds"
    if mask < 0 or mask == tokenizer.eos_token_id:
        raise DataError(found=f"MASK id {mask}, EOS id {tokenizer.eos_token_id}", required=required, remedy=remedy)
    if mask < len(tokenizer) and mask not in tokenizer.added_tokens_decoder:
        token = tokenizer.convert_ids_to_tokens(mask)
        raise DataError(found=f"MASK id {mask}, the ordinary token {token!r}", required=required, remedy=remedy)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return ControlIds(eos=tokenizer.eos_token_id, pad=pad, mask=mask)


def check_mask(directory: str | Path, mask_token_id: int) -> None:
    """Raise `DataError` if the id is a token of ordinary text. Reads only `tokenizer.json`, which is all that a rank needs."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_tokenizer_file(directory)))
    token = tokenizer.id_to_token(mask_token_id)
    if token is not None and mask_token_id not in tokenizer.get_added_tokens_decoder():
        raise DataError(
            found=f"cycle.mask_token_id = {mask_token_id}, the ordinary token {token!r} of {directory}",
            required="an id of its own, which no text holds: models with another cannot be exported",
            remedy="set cycle.mask_token_id to a special token that no text needs (Qwen3: 151660; tools/train_tokenizer.py: 2)",
        )


def encoder_json(tokenizer: PreTrainedTokenizerFast, control: ControlIds, *, chats: bool) -> str:
    """The tokenizer as `tokenizers` reads it, without the length limits that a tokenizer.json may carry.

    For texts the control tokens are marked special, because special tokens can be made to stay text: Qwen3's MASK <|fim_middle|>
    is an added token without the mark. For `chats` the template's tokens must be recognised, so nothing changes.
    """
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy
    backend.no_truncation()
    backend.no_padding()
    if not chats:
        added = backend.get_added_tokens_decoder()
        contents = [added[token_id].content for token_id in (control.eos, control.pad, control.mask) if token_id in added]
        backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in contents])
    return backend.to_str()


def vocabulary_size(tokenizer_json: str, control: ControlIds) -> int:
    """The highest id that may be written, plus 1."""
    model = json.loads(tokenizer_json)
    vocabulary = model["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # unigram models: pairs of token and score, numbered by place
        highest = len(vocabulary) - 1
    else:
        highest = max(vocabulary.values(), default=0)
    return max(highest, control.eos, *(token["id"] for token in model["added_tokens"])) + 1


class TextEncoder:
    """Text to ids by the `tokenizers` library: the reference for all other encoders. Nothing is added or truncated."""

    def __init__(self, tokenizer_json: str, *, chats: bool = False) -> None:
        """`tokenizer_json` comes from `encoder_json`. Unless for `chats`, tokens marked special stay ordinary characters."""
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(tokenizer_json)
        self._backend.encode_special_tokens = not chats

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """The ids of each text, without EOS."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of all texts one after the other, and the number of ids of each."""
        batch = self.encode_batch(texts)
        return np.concatenate([np.empty(0, np.int32), *batch]), np.array([ids.size for ids in batch], dtype=np.int64)

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of a text, and for each its first character and the one behind its last: an array of two columns."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)


def train_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    output_dir: str | Path,
    min_frequency: int = 2,
    overwrite: bool = False,
    show_progress: bool = False,
) -> int:
    """Train a byte-level BPE on `texts`, save it as a Hugging Face folder, and return its real size.

    `vocab_size` counts the 256 bytes and EOS, PAD and MASK. A small corpus may hold too few pairs that occur `min_frequency`
    times; the tokenizer is then smaller. Any text survives encoding and decoding. Raises `DataError` before any work if the
    vocabulary is too small, the folder holds one already without `overwrite`, or there is no text.
    """
    output_dir = Path(output_dir)
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            found=f"a vocabulary of {vocab_size}",
            required=f"at least {SMALLEST_VOCABULARY}: all bytes, EOS, PAD and MASK",
            remedy="raise the vocabulary size",
        )
    if (output_dir / "tokenizer.json").exists() and not overwrite:
        raise DataError(found=f"a tokenizer in {output_dir}", required="a new one", remedy="name another, or pass --overwrite")
    iterator = iter(texts)
    first = next(iterator, None)
    if first is None:
        raise DataError(found="no documents", required="text to train on", remedy="check the input and the held-out fraction")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(_CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    backend.train_from_iterator(chain([first], iterator), trainer)
    _save(backend.to_str(pretty=True), output_dir)
    return backend.get_vocab_size()


def _save(tokenizer_json: str, output_dir: Path) -> None:
    """Write the three files of the folder, each atomically; tokenizer.json, which identifies the folder, comes last."""
    control = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN, "mask_token": MASK_TOKEN}
    config = {
        # The class name is the one that every version of transformers knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Clean-up would remove spaces before punctuation.
        "clean_up_tokenization_spaces": False,
        # transformers 4 would otherwise return token_type_ids as well, which no decoder's `generate` takes.
        "model_input_names": ["input_ids", "attention_mask"],
        **control,
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    texts = {
        "special_tokens_map.json": json.dumps(control, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "tokenizer.json": tokenizer_json,
    }
    for name, text in texts.items():
        write_atomically(output_dir / name, text)
