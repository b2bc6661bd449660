"""Where a run's rows come from, and how they become microbatches.

The loop takes any `RowSource`; `open_corpora` opens those that the configuration names, packed corpora.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core import parallel_state

from megatron_dmtd.config import Config, batch_size
from megatron_dmtd.data.batches.blending import open_blend
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.loader import batches, prefetched
from megatron_dmtd.data.batches.rows import RowSource
from megatron_dmtd.data.corpora.bos import bos_of_corpora
from megatron_dmtd.data.corpora.verify import check_one_tokenizer, check_tokenizer
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.training.objectives import Microbatch, Objective
from megatron_dmtd.training.state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The rows of a run."""

    train: RowSource[Any]
    valid: RowSource[Any] | None
    """Held-out rows; None: nothing is evaluated."""


#: opens a run's rows: called before anything else exists, to refuse what cannot be read, and again before the first step
OpenSources = Callable[[Config], Sources]


def open_corpora(config: Config) -> Sources:
    """The packed corpora that `data` names. Raises `DataError` or `ConfigError` for those that cannot be used."""
    data = with_bos(config).data
    check_one_tokenizer((*data.train, *data.valid))
    train = open_blend(functools.partial(open_corpus, config), data.train, data.train_weights, seed=data.shuffle_seed)
    return Sources(train=train, valid=open_corpus(config, data.valid) if data.valid else None)


def with_bos(config: Config) -> Config:
    """The configuration that says how documents begin, as the manifests of all its corpora do; `auto` if none does.

    Raises `ConfigError` if they do not begin alike, or not as `data.add_bos` says.
    """
    data = config.data
    found = bos_of_corpora((*data.train, *data.valid))
    if found == "auto":
        return config
    if data.add_bos not in ("auto", found):
        raise ConfigError(
            found=f"data.add_bos = {data.add_bos}, and corpora made with --add-bos {found}",
            required="the setting of the corpora",
            remedy=f"set data.add_bos to {found} or auto, or make the corpora again with --add-bos {data.add_bos}",
        )
    return replace(config, data=replace(data, add_bos=found))


def open_corpus(config: Config, prefixes: tuple[str, ...]) -> PackedDataset:
    """Token files as one corpus, in the run's rows."""
    data = config.data
    if data.tokenizer:
        for prefix in prefixes:
            check_tokenizer(prefix, data.tokenizer)
    return PackedDataset(
        prefixes,
        seq_length=data.seq_length,
        cycle_length=config.cycle.cycle_length,
        pad_token_id=data.pad_token_id,
        shuffle_seed=data.shuffle_seed,
        vocab_size=config.model.vocab_size,
        mask_token_id=None if config.cycle.is_vanilla else config.cycle.mask_token_id,
        packing=data.packing,
        cache_dir=data.cache_dir or os.path.join(os.path.dirname("".join(prefixes[:1])), "index-cache"),
    )


def microbatches(run: RunState, rows: RowSource[Any], *, first_row: int, end_row: int | None = None) -> Iterator[Any]:
    """The rank's microbatches for training or, with `end_row`, for an evaluation, whose global batches are never ramped up."""
    training = run.config.training
    found = batches(
        rows,
        first_row=first_row,
        rows_of_batch=functools.partial(batch_size, training) if end_row is None else lambda _: training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        end_row=end_row,
        make_batch=functools.partial(_make_batch, run.objective, run.config.training.objective),
    )
    return prefetched(found, depth=run.config.data.prefetch_batches)


def _make_batch(objective: Objective[Any], name: str, rows: Sequence[Any]) -> Microbatch:
    foreign = {type(row).__name__ for row in rows if not isinstance(row, objective.row_type)}
    if foreign:
        raise ConfigError(
            found=f"rows of type {', '.join(sorted(foreign))} for training.objective = {name}",
            required=f"rows of type {objective.row_type.__name__}",
            remedy="choose the objective that these rows were made for, or another source of rows",
        )
    batch: Microbatch = objective.make_batch(rows)
    return batch
