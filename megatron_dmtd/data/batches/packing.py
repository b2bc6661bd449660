"""Packing as index arithmetic: which tokens of which document fill each row of an epoch.

A document of n tokens gives n - 1 inputs t_0 .. t_{n-2} with the targets t_1 .. t_{n-1}, and takes as many slots as complete
the last cycle of its inputs. Rows are whole cycles, and so are all pieces, so that every slot has the same phase in every row
(docs/method.md, section 1.4). After a cut the next piece starts again at position 0.

- `concatenate`: the slots of all documents, in the order of the epoch, form one stream that is cut every `seq_length` slots. The
  end of the last row is a document of padding.
- `best-fit`: a document is cut only if it is longer than a row, into whole rows and a remainder. Remainders and shorter documents
  are placed in descending order of length, each into the fullest row that still has room for it. The rest of a row is padding.

This module works on lengths alone: no tokens, no files, no torch. A plan consists of a few arrays, in memory or on disk.

Shape legend: U documents, Z documents kept (those with a target), J pieces, R rows of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from megatron_dmtd.cycle import complete_length

Array = npt.NDArray[np.integer]
Packing = Literal["concatenate", "best-fit"]

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


def epoch_order(num_documents: int, *, shuffle_seed: int | None, epoch: int, stream: int = 0) -> npt.NDArray[np.int64]:
    """The order of the documents in `epoch`, int64 [U]: a permutation, or 0 .. U - 1 if `shuffle_seed` is None.

    Another `stream` gives an unrelated order: that of the rows.

    It sorts raw Philox words instead of calling `Generator.permutation`: NumPy guarantees the output of a bit generator across
    versions, but not that of a method, and a resumed run must see the same order on any machine.
    """
    if shuffle_seed is None:
        return np.arange(num_documents, dtype=np.int64)
    words = np.random.Philox(np.random.SeedSequence([shuffle_seed, epoch, *([stream] if stream else [])])).random_raw(
        num_documents
    )
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCounts:
    """What an epoch holds. Only `num_cut`, and only under concatenation, depends on the order of its documents."""

    num_rows: int
    """Rows of the epoch."""
    num_slots: int
    """Slots of all documents, with the padding that completes their last cycles, without what fills rows."""
    num_targets: int
    """Slots that carry loss."""
    num_kept: int
    """Documents with a target."""
    num_skipped: int
    """Documents left out, because they have no target."""
    num_cut: int
    """Documents that lie in more than one row."""


class EpochPlan:
    """The rows of one epoch, concatenated. Every target of the corpus lies in exactly one of them."""

    def __init__(
        self,
        document_lengths: Sequence[int] | npt.NDArray[np.integer],
        order: Sequence[int] | npt.NDArray[np.integer],
        *,
        seq_length: int,
        cycle_length: int,
        row_order: Callable[[int], Array] | None = None,
    ) -> None:
        """Plan the documents `order`, whose lengths in tokens are `document_lengths[order]`.

        `seq_length` is the number of slots per row, a multiple of `cycle_length`. Documents of fewer than 2 tokens have no
        target; they are left out and counted in `num_skipped`. `row_order(num_rows)` is the order of the rows, a permutation:
        without it, the rows of a long document follow each other, and a batch may be one document.
        """
        documents_Z, num_inputs_Z, num_skipped = _keep(document_lengths, order, seq_length=seq_length, cycle_length=cycle_length)
        slot_ends_Z = np.cumsum(complete_length(num_inputs_Z, cycle_length), dtype=np.int64)
        num_slots = int(slot_ends_Z[-1]) if slot_ends_Z.size else 0
        begins_Z = np.concatenate((np.zeros(1, np.int64), slot_ends_Z[:-1]))[: slot_ends_Z.size]
        counts = PlanCounts(
            num_rows=-(-num_slots // seq_length),
            num_slots=num_slots,
            num_targets=int(num_inputs_Z.sum()),
            num_kept=documents_Z.size,
            num_skipped=num_skipped,
            num_cut=int((begins_Z // seq_length != (slot_ends_Z - 1) // seq_length).sum()),
        )
        arrays = {"documents": documents_Z, "num_inputs": num_inputs_Z, "slot_ends": slot_ends_Z}
        if row_order is not None:
            arrays["row_order"] = row_order(counts.num_rows).astype(np.int64)
        self._set(arrays, counts, seq_length=seq_length, cycle_length=cycle_length)

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], counts: PlanCounts, *, seq_length: int, cycle_length: int) -> Self:
        """A plan from its `arrays` and `counts`, as they were."""
        plan = cls.__new__(cls)
        plan._set(arrays, counts, seq_length=seq_length, cycle_length=cycle_length)
        return plan

    def _set(self, arrays: Mapping[str, Array], counts: PlanCounts, *, seq_length: int, cycle_length: int) -> None:
        self.arrays = arrays
        """Everything that has to be kept of a plan, except its counts."""
        self.counts = counts
        self.seq_length = seq_length
        self.cycle_length = cycle_length

    @property
    def num_rows(self) -> int:
        """Rows of the epoch. It does not depend on the order of the documents."""
        return self.counts.num_rows

    @property
    def num_slots(self) -> int:
        """Slots of all documents, without what fills rows."""
        return self.counts.num_slots

    @property
    def num_targets(self) -> int:
        """Slots of the epoch that carry loss."""
        return self.counts.num_targets

    @property
    def num_skipped(self) -> int:
        """Documents left out, because they have no target."""
        return self.counts.num_skipped

    def row(self, index: int) -> list[Piece]:
        """The pieces of row `index`, in order; their slots add up to `seq_length`."""
        assert 0 <= index < self.num_rows, (index, self.num_rows)
        if "row_order" in self.arrays:
            index = int(self.arrays["row_order"][index])
        slot_ends_Z = self.arrays["slot_ends"]
        begin, end = index * self.seq_length, (index + 1) * self.seq_length
        pieces = []
        at = begin
        nth = int(np.searchsorted(slot_ends_Z, begin, side="right"))
        while at < end and nth < slot_ends_Z.size:
            piece = self._piece(nth, at, end)
            pieces.append(piece)
            at += piece.num_slots
            nth += 1
        return pieces + _padding(end - at)

    def _piece(self, nth: int, at: int, end: int) -> Piece:
        """What the `nth` document kept puts into the slots from `at` to `end` of the stream."""
        slot_ends_Z = self.arrays["slot_ends"]
        document_begin = int(slot_ends_Z[nth - 1]) if nth else 0
        start = at - document_begin
        num_slots = min(int(slot_ends_Z[nth]), end) - at
        num_inputs = min(int(self.arrays["num_inputs"][nth]) - start, num_slots)
        return Piece(document=int(self.arrays["documents"][nth]), start=start, num_inputs=num_inputs, num_slots=num_slots)


class BestFitPlan(EpochPlan):
    """The rows of one epoch, packed by best fit. Every target of the corpus lies in exactly one of them."""

    def __init__(
        self,
        document_lengths: Sequence[int] | npt.NDArray[np.integer],
        order: Sequence[int] | npt.NDArray[np.integer],
        *,
        seq_length: int,
        cycle_length: int,
        row_order: Callable[[int], Array] | None = None,
    ) -> None:
        """Plan the documents `order`, as `EpochPlan` does; among documents of one length, those early in `order` go first.

        `row_order(num_rows)` is the order of the rows, a permutation. None: by the place in `order` of their first document.
        """
        documents_Z, num_inputs_Z, num_skipped = _keep(document_lengths, order, seq_length=seq_length, cycle_length=cycle_length)
        rest_Z = np.arange(documents_Z.size)[num_inputs_Z % seq_length > 0]
        rest_Z = rest_Z[np.argsort(-complete_length(num_inputs_Z[rest_Z] % seq_length, cycle_length), kind="stable")]
        rest_inputs = num_inputs_Z[rest_Z] % seq_length
        rows_of_rests, num_bins = _best_fit(
            complete_length(rest_inputs, cycle_length) // cycle_length, seq_length // cycle_length
        )
        # the whole rows of long documents come behind the shared ones
        whole_Z = num_inputs_Z // seq_length
        owner_of_whole = np.repeat(np.arange(documents_Z.size), whole_Z)
        nth_of_whole = np.arange(owner_of_whole.size) - np.repeat(np.cumsum(whole_Z) - whole_Z, whole_Z)
        place_J = np.concatenate((rest_Z, owner_of_whole))
        starts_J = np.concatenate((num_inputs_Z[rest_Z] - rest_inputs, nth_of_whole * seq_length))
        inputs_J = np.concatenate((rest_inputs, np.full(owner_of_whole.size, seq_length, dtype=np.int64)))
        rows_J = np.concatenate((rows_of_rests, num_bins + np.arange(owner_of_whole.size)))
        num_rows = num_bins + owner_of_whole.size
        rank_R = np.empty(num_rows, dtype=np.int64)
        rank_R[_row_order(rows_J, place_J, starts_J, num_rows) if row_order is None else row_order(num_rows)] = np.arange(
            num_rows
        )
        sorted_J = np.argsort(rank_R[rows_J], kind="stable")
        arrays = {
            "documents": documents_Z[place_J[sorted_J]],
            "starts": starts_J[sorted_J],
            "num_inputs": inputs_J[sorted_J],
            "row_ends": np.cumsum(np.bincount(rank_R[rows_J], minlength=num_rows), dtype=np.int64),
        }
        counts = PlanCounts(
            num_rows=num_rows,
            num_slots=int(complete_length(inputs_J, cycle_length).sum()),
            num_targets=int(num_inputs_Z.sum()),
            num_kept=documents_Z.size,
            num_skipped=num_skipped,
            num_cut=int((num_inputs_Z > seq_length).sum()),
        )
        self._set(arrays, counts, seq_length=seq_length, cycle_length=cycle_length)

    def row(self, index: int) -> list[Piece]:
        """The pieces of row `index`, in order; their slots add up to `seq_length`."""
        assert 0 <= index < self.num_rows, (index, self.num_rows)
        begin = int(self.arrays["row_ends"][index - 1]) if index else 0
        pieces = []
        for nth in range(begin, int(self.arrays["row_ends"][index])):
            num_inputs = int(self.arrays["num_inputs"][nth])
            pieces.append(
                Piece(
                    document=int(self.arrays["documents"][nth]),
                    start=int(self.arrays["starts"][nth]),
                    num_inputs=num_inputs,
                    num_slots=complete_length(num_inputs, self.cycle_length),
                )
            )
        return pieces + _padding(self.seq_length - sum(piece.num_slots for piece in pieces))


def _padding(num_slots: int) -> list[Piece]:
    return [Piece(document=PADDING, start=0, num_inputs=0, num_slots=num_slots)] if num_slots else []


def _keep(
    document_lengths: Sequence[int] | Array, order: Sequence[int] | Array, *, seq_length: int, cycle_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """The documents with a target, in order, their numbers of inputs, and the number of documents without one."""
    assert seq_length > 0 and complete_length(seq_length, cycle_length) == seq_length, (seq_length, cycle_length)
    order_U = np.asarray(order, dtype=np.int64)
    num_inputs_U = np.asarray(document_lengths, dtype=np.int64)[order_U] - 1
    kept_U = num_inputs_U > 0
    return order_U[kept_U], num_inputs_U[kept_U], int(order_U.size - kept_U.sum())


def _row_order(rows_J: Array, place_J: Array, starts_J: Array, num_rows: int) -> Array:
    """Rows by the place of the piece that opened them, then by where that piece starts."""
    opened_R = np.zeros(num_rows, dtype=np.int64)
    opened_R[rows_J[::-1]] = np.arange(rows_J.size)[::-1]  # the first piece of each row wins
    return np.lexsort((starts_J[opened_R], place_J[opened_R]))


def _best_fit(sizes_J: Array, capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """A bin for each piece, and the number of bins. Sizes descend; each piece goes into the fullest bin that fits.

    Pieces of equal size, and bins with equal room, are handled together, so that the work is at most quadratic in `capacity`,
    whatever the number of pieces: a bin with room r takes r // size pieces in succession, because after each of them it is still
    the fullest bin that can take another.
    """
    bins_J = np.empty(sizes_J.size, dtype=np.int64)
    bins_by_room: list[list[Array]] = [[] for _ in range(capacity + 1)]
    has_bins = np.zeros(capacity + 1, dtype=bool)
    num_bins, at = 0, 0
    num_of_size = np.bincount(sizes_J, minlength=capacity + 1)
    for size in range(capacity, 0, -1):
        end = at + int(num_of_size[size])
        for room in (size + np.flatnonzero(has_bins[size:])).tolist():
            if at == end:
                break
            bins = np.concatenate(bins_by_room[room])
            at, left, used = _fill(bins_J, at, end, bins, room, size)
            bins_by_room[room] = [left] if left.size else []
            has_bins[room] = bool(left.size)
            _put_back(bins_by_room, has_bins, used)
        if at < end:
            needed = -(-(end - at) // (capacity // size))
            at, _, used = _fill(bins_J, at, end, np.arange(num_bins, num_bins + needed), capacity, size)
            num_bins += needed
            _put_back(bins_by_room, has_bins, used)
        assert at == end, (at, end)
    return bins_J, num_bins


def _fill(
    bins_J: npt.NDArray[np.int64], at: int, end: int, bins: Array, room: int, size: int
) -> tuple[int, Array, list[tuple[int, Array]]]:
    """Put the pieces `at` to `end`, all of one size, into `bins`, all with equal room.

    Returns the first piece that was not placed, the bins that were not used, and the (room, bins) that were.
    """
    per_bin = room // size
    used = bins[: -(-(end - at) // per_bin)]
    placed = min(end - at, per_bin * used.size)
    bins_J[at : at + placed] = np.repeat(used, per_bin)[:placed]
    in_last = placed - per_bin * (used.size - 1)
    return at + placed, bins[used.size :], [(room - per_bin * size, used[:-1]), (room - in_last * size, used[-1:])]


def _put_back(bins_by_room: list[list[Array]], has_bins: npt.NDArray[np.bool_], used: list[tuple[int, Array]]) -> None:
    for room, bins in used:
        if room and bins.size:
            bins_by_room[room].append(bins)
            has_bins[room] = True


def packing_report(counts: PlanCounts, *, seq_length: int) -> str:
    """The counts in words: rows, share of padding, share of documents cut."""
    slots = max(counts.num_rows * seq_length, 1)
    padding = 100 * (slots - counts.num_targets) / slots
    cut = 100 * counts.num_cut / max(counts.num_kept, 1)
    skipped = f", {counts.num_skipped} without a target left out" if counts.num_skipped else ""
    return (
        f"{counts.num_kept} documents in {counts.num_rows} rows of {seq_length}, {counts.num_targets} targets; "
        f"{padding:.2f} % of the slots are padding, {cut:.2f} % of the documents are cut{skipped}"
    )
