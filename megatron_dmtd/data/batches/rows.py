"""Rows, and what training requires of a source of rows.

The packed corpus (`dataset.py`) is one source. Another, such as the rollouts of reinforcement learning, may have rows of its own
type: the loader and the resume position need only the rows' numbers, and the objective makes batches of the rows.

Shape legend: N slots of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

RowT_co = TypeVar("RowT_co", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of packed documents; the fields are those of `Batch` without B."""

    tokens_N: npt.NDArray[np.int64]
    labels_N: npt.NDArray[np.int64]
    loss_mask_N: npt.NDArray[np.float32]
    positions_N: npt.NDArray[np.int64]
    document_lengths: tuple[int, ...]


class RowSource(Protocol[RowT_co]):
    """Rows by number, without end. A run is resumed by the number of its next row, so the same number must give the same row."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows after which all have been seen once; 0 for a source without epochs."""
        ...

    @property
    def targets_per_epoch(self) -> int:
        """Slots of an epoch with a token to predict; 0 for a source without epochs."""
        ...

    def __getitem__(self, index: int, /) -> RowT_co:
        """Row `index`, counted over all epochs."""
        ...

    def padding_row(self) -> RowT_co:
        """A row without a target: it completes the last batch of an evaluation."""
        ...
