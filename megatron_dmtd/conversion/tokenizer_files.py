"""What an export takes from a tokenizer's folder: its files, the ids that begin and end text, and how to generate by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.data.corpora.bos import AddBos, bos_of, ids_by, with_bos
from megatron_dmtd.data.corpora.tokenizer import MADE_FROM, control_ids, load_tokenizer
from megatron_dmtd.errors import ConversionError, Refusal
from megatron_dmtd.infra.digests import sha256_of_file
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.infra.special_tokens import added_ids

GENERATION_FILE = "generation_config.json"
_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.model",
    "*.tiktoken",
)
_DAMAGED = Refusal(ConversionError, required="a JSON object", remedy="copy the folder again")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_files(directory: str | Path) -> list[Path]:
    """The tokenizer's files in a directory; none if it holds no tokenizer."""
    return sorted({path for pattern in _PATTERNS for path in Path(directory).glob(pattern)})


def check_mask(cycle: CycleConfig, tokenizer_dir: str | Path | None) -> None:
    """Raise `DataError` if the MASK of the cycles is a token that text may hold, as far as a tokenizer can tell."""
    if cycle.is_vanilla or tokenizer_dir is None or not (Path(tokenizer_dir) / "tokenizer.json").is_file():
        return
    control_ids(load_tokenizer(tokenizer_dir), mask_token_id=cycle.mask_token_id)


def generation_settings(tokenizer_dir: str | Path | None) -> dict[str, Any]:
    """The fields of an export's `generation_config.json`: the folder's own, or else the ids that its tokenizer names."""
    if tokenizer_dir is None:
        return {}
    path = Path(tokenizer_dir) / GENERATION_FILE
    if path.is_file():
        return read_object(path, _DAMAGED)
    if not (Path(tokenizer_dir) / "tokenizer.json").is_file():
        return {}
    tokenizer = load_tokenizer(tokenizer_dir)
    return {name: getattr(tokenizer, name) for name in _IDS if getattr(tokenizer, name) is not None}


def begin_texts(directory: Path, add_bos: AddBos) -> None:
    """Make the tokenizer in `directory` begin texts as the documents of a training run began, whatever reads it.

    Its files stay as they are if it does so already, or `add_bos` is `auto`. Raises `ConversionError` if it cannot be changed.
    """
    if add_bos == "auto":
        return
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConversionError(
            found=f"no tokenizer.json, for a model whose documents began {'with' if add_bos == 'yes' else 'without'} BOS",
            required="the tokenizer of its corpora, whose prompts must begin alike",
            remedy="name that tokenizer's directory (--tokenizer)",
        )
    tokenizer = load_tokenizer(directory)
    bos = bos_of(tokenizer, add_bos)
    wanted: tuple[list[int], list[int]] = ([] if bos is None else [bos], [])
    if added_ids(ids_by(tokenizer.backend_tokenizer)) == wanted:
        return
    settings = read_object(directory / "tokenizer_config.json", _DAMAGED)
    settings |= {"add_bos_token": bos is not None, "add_eos_token": False, MADE_FROM: sha256_of_file(path)}
    path.write_text(with_bos(path.read_text(encoding="utf-8"), bos), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    found = added_ids(ids_by(load_tokenizer(directory).backend_tokenizer))
    if found != wanted:
        raise ConversionError(
            found=f"a tokenizer that puts {found[0]} before a text and {found[1]} after it, whatever its files say",
            required=f"{wanted[0]} before it and nothing after it, as in the corpora of the model",
            remedy="change the tokenizer, make the corpora again with it, and train on these",
        )


def special_ids(settings: dict[str, Any]) -> dict[str, Any]:
    """The ids among generation settings that `config.json` repeats, for runtimes that read only that."""
    return {name: settings[name] for name in _IDS if settings.get(name) is not None}
