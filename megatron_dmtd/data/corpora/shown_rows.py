"""Which rows `preprocess.py rows` shows: those of a training configuration, of options, or of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dmtd.config import Config, DataConfig, from_yaml
from megatron_dmtd.data.batches.blending import open_blend
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.data.batches.packing import Packing
from megatron_dmtd.data.corpora.row_view import PackedRows
from megatron_dmtd.data.corpora.verify import check_tokenizer
from megatron_dmtd.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """What was asked for; None and empty leave it to the configuration."""

    prefix: Sequence[str] = ()
    config: str | None = None
    held_out: bool = False
    tokenizer: str | None = None
    seq_length: int | None = None
    cycle_length: int | None = None
    packing: Packing | None = None
    shuffle_seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRows:
    """Rows, and what it takes to read them."""

    rows: PackedRows
    tokenizer: str
    cycle_length: int


def open_rows(options: RowOptions) -> ShownRows:
    """The rows that a run with these settings reads, in its order.

    Raises `ConfigError` if something is missing, `DataError` if a file cannot be used or is another tokenizer's.
    """
    config = from_yaml(options.config) if options.config else Config()
    given = {name: getattr(options, name) for name in ("tokenizer", "seq_length", "packing", "shuffle_seed")}
    data = dataclasses.replace(config.data, **{name: value for name, value in given.items() if value is not None})
    prefixes = tuple(options.prefix) or (data.valid if options.held_out else data.train)
    _require_enough(options, data, prefixes)
    for prefix in prefixes:
        check_tokenizer(prefix, data.tokenizer)
    cycle_length = options.cycle_length or config.cycle.cycle_length
    pad_token_id = data.pad_token_id if options.config else _pad_token_id(prefixes[0])

    def open_corpus(part: tuple[str, ...]) -> PackedDataset:
        return PackedDataset(
            part,
            seq_length=data.seq_length,
            cycle_length=cycle_length,
            pad_token_id=pad_token_id,
            shuffle_seed=data.shuffle_seed,
            packing=data.packing,
        )

    weights = data.train_weights if prefixes == config.data.train else ()
    rows = open_blend(open_corpus, prefixes, weights, seed=data.shuffle_seed)
    return ShownRows(rows=rows, tokenizer=data.tokenizer, cycle_length=cycle_length)


def _require_enough(options: RowOptions, data: DataConfig, prefixes: Sequence[str]) -> None:
    missing = [] if prefixes else ["token files"]
    missing += [] if data.tokenizer else ["a tokenizer"]
    missing += [] if options.config or options.seq_length else ["a row length"]
    if missing:
        raise ConfigError(
            found=f"neither in the options nor in a configuration: {', '.join(missing)}",
            required="prefixes of token files, --tokenizer and --seq-length",
            remedy="give them, or name the run's recipe with --config",
        )


def _pad_token_id(prefix: str) -> int:
    manifest = read_manifest(prefix)
    return 0 if manifest is None else manifest.pad_token_id
