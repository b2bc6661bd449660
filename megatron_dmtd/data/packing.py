"""Concatenate-and-cut packing as index arithmetic: which tokens of which document fill each row of an epoch.

A document of n tokens gives n - 1 inputs t_0 .. t_{n-2} with the targets t_1 .. t_{n-1}, and takes as many slots as complete
the last cycle of its inputs. The slots of all documents, in the order of the epoch, form one stream that is cut every
`seq_length` slots. Rows are whole cycles, so a cut falls between two cycles, and every slot has the same phase in every row
(specification, section 1.4). A piece behind a cut starts again at position 0. The end of the last row is a document of padding.

This module knows lengths only: no token, no file, no torch.

Shape legend: D documents, K documents kept (those with a target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dmtd.cycle import complete_length

#: `Piece.document` of slots that belong to no document
PADDING = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of slots of one row that belong to one document. Its positions count from 0."""

    document: int
    """Index of the document in the corpus, or `PADDING`."""
    start: int
    """The first input of the piece, in tokens from the start of the document."""
    num_inputs: int
    """Slots with an input and a target. The targets are the tokens `start + 1` to `start + num_inputs`."""
    num_slots: int
    """All slots of the piece: whole cycles. Those after `num_inputs` are padding."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_inputs <= self.num_slots and self.num_slots > 0 and self.start >= 0, self
        assert (self.document == PADDING) == (self.num_inputs == 0), self


def epoch_order(num_documents: int, *, shuffle_seed: int | None, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the documents in `epoch`, int64 [D]: a permutation, or 0 .. D - 1 if `shuffle_seed` is None.

    It sorts raw Philox words instead of calling `Generator.permutation`: NumPy promises the words of a bit generator for ever,
    but not the stream of a method, and a resumed run must see the same order on any machine.
    """
    if shuffle_seed is None:
        return np.arange(num_documents, dtype=np.int64)
    words = np.random.Philox(np.random.SeedSequence([shuffle_seed, epoch])).random_raw(num_documents)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class EpochPlan:
    """The rows of one epoch. Every target of the corpus lies in exactly one of them."""

    def __init__(
        self,
        document_lengths: Sequence[int] | npt.NDArray[np.integer],
        order: Sequence[int] | npt.NDArray[np.integer],
        *,
        seq_length: int,
        cycle_length: int,
    ) -> None:
        """Plan the documents `order`, whose lengths in tokens are `document_lengths[order]`.

        `seq_length` is the number of slots per row, a multiple of `cycle_length`. Documents of fewer than 2 tokens have no
        target; they are left out and counted in `num_skipped`.
        """
        assert seq_length > 0 and complete_length(seq_length, cycle_length) == seq_length, (seq_length, cycle_length)
        order_D = np.asarray(order, dtype=np.int64)
        num_inputs_D = np.asarray(document_lengths, dtype=np.int64)[order_D] - 1
        kept_D = num_inputs_D > 0
        self._documents_K = order_D[kept_D]
        self._num_inputs_K = num_inputs_D[kept_D]
        self._slot_ends_K = np.cumsum(complete_length(self._num_inputs_K, cycle_length), dtype=np.int64)
        self.seq_length = seq_length
        self.num_skipped = int(order_D.size - self._documents_K.size)
        """Documents left out, because they have no target."""
        self.num_targets = int(self._num_inputs_K.sum())
        """Slots of the epoch that carry loss."""

    @property
    def num_slots(self) -> int:
        """Slots of all documents, without the padding at the end of the last row."""
        return int(self._slot_ends_K[-1]) if self._slot_ends_K.size else 0

    @property
    def num_rows(self) -> int:
        """Rows of the epoch. It does not depend on the order of the documents."""
        return -(-self.num_slots // self.seq_length)

    def row(self, index: int) -> list[Piece]:
        """The pieces of row `index`, in order; their slots add up to `seq_length`."""
        assert 0 <= index < self.num_rows, (index, self.num_rows)
        begin, end = index * self.seq_length, (index + 1) * self.seq_length
        pieces = []
        at = begin
        nth = int(np.searchsorted(self._slot_ends_K, begin, side="right"))
        while at < end and nth < self._documents_K.size:
            piece = self._piece(nth, at, end)
            pieces.append(piece)
            at += piece.num_slots
            nth += 1
        if at < end:
            pieces.append(Piece(document=PADDING, start=0, num_inputs=0, num_slots=end - at))
        return pieces

    def _piece(self, nth: int, at: int, end: int) -> Piece:
        """What the `nth` document kept puts into the slots from `at` to `end` of the stream."""
        document_begin = int(self._slot_ends_K[nth - 1]) if nth else 0
        start = at - document_begin
        num_slots = min(int(self._slot_ends_K[nth]), end) - at
        num_inputs = min(int(self._num_inputs_K[nth]) - start, num_slots)
        return Piece(document=int(self._documents_K[nth]), start=start, num_inputs=num_inputs, num_slots=num_slots)
