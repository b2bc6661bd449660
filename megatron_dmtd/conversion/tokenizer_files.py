"""What an export takes from a tokenizer's folder: its files, the ids that begin and end text, and how to generate by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.data.corpora.tokenizer import control_ids, load_tokenizer
from megatron_dmtd.errors import ConversionError, Refusal
from megatron_dmtd.infra.json_files import read_object

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


def special_ids(settings: dict[str, Any]) -> dict[str, Any]:
    """The ids among generation settings that `config.json` repeats, for runtimes that read only that."""
    return {name: settings[name] for name in _IDS if settings.get(name) is not None}
