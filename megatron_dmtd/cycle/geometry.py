"""Positions, documents and streams of the slots of a packed row, from the lengths of its documents.

NumPy only, so that data and planning can use it without torch. Visibility is decided by `rule.visible`, not here.

Shape legend: N slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_dmtd.cycle.rule import complete_length
from megatron_dmtd.errors import DataError


class Slots(NamedTuple):
    """Slots of the parallel layers, as three arrays of equal shape (NumPy, or torch tensors in `mask.py`)."""

    is_real: Any
    """True in the real stream, False in the shadow stream; bool."""
    document: Any
    """Index of the slot's document in its row; integer."""
    position: Any
    """Position of the slot in its document, from 0; integer."""


def positions(document_lengths: Sequence[int]) -> np.ndarray:
    """Position of each slot in its document, int64 [N]: `positions([3, 2])` is `[0, 1, 2, 0, 1]`."""
    return np.concatenate([np.arange(0), *(np.arange(length) for length in document_lengths)]).astype(np.int64)


def documents(document_lengths: Sequence[int]) -> np.ndarray:
    """Index of each slot's document, int64 [N]: `documents([3, 2])` is `[0, 0, 0, 1, 1]`."""
    return np.repeat(np.arange(len(document_lengths), dtype=np.int64), np.asarray(document_lengths, dtype=np.int64))


def real_slots(document_lengths: Sequence[int]) -> Slots:
    """The real stream of a row, one slot per token."""
    document_N = documents(document_lengths)
    return Slots(np.ones(document_N.shape, dtype=bool), document_N, positions(document_lengths))


def shadow_slots(document_lengths: Sequence[int]) -> Slots:
    """The shadow stream of a row, one slot per token."""
    return real_slots(document_lengths)._replace(is_real=np.zeros(sum(document_lengths), dtype=bool))


def join(*groups: Slots) -> Slots:
    """The slots of all groups, one after the other."""
    return Slots(*(np.concatenate(parts) for parts in zip(*groups)))


def padded_document_lengths(lengths: Sequence[int], cycle_length: int) -> tuple[int, ...]:
    """Each length rounded up to whole cycles: the slots that a document takes in a row.

    Decoding always computes whole blocks; in the bidirectional variants a truncated training block would give other numbers.
    """
    return tuple(complete_length(length, cycle_length) for length in lengths)


def require_whole_cycles(document_lengths: Sequence[int], cycle_length: int, *, row_length: int | None = None) -> None:
    """Accept a row of whole cycles (with `row_length` slots in total, if given), or raise `DataError`."""
    for index, length in enumerate(document_lengths):
        if length <= 0 or complete_length(length, cycle_length) != length:
            raise DataError(
                found=f"document {index} of the row has {length} slots",
                required=f"a positive multiple of the cycle length {cycle_length} in every document",
                remedy="pad each document to whole cycles and mask the loss of the padding (padded_document_lengths)",
            )
    if row_length is not None and sum(document_lengths) != row_length:
        raise DataError(
            found=f"documents of {' + '.join(map(str, document_lengths))} = {sum(document_lengths)} slots",
            required=f"a row of {row_length} slots",
            remedy="fill the end of the row with a document of padding, or cut the last document between two cycles",
        )
