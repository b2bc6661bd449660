"""Microbatches of one data-parallel rank, in order, from any row on.

A global batch holds the rows that follow the batch before it, however many ranks share them, so a run may be resumed on another
number of ranks. Its size may change during a run and depends on the number of rows before it. Tensor- and pipeline-parallel ranks
of one replica ask for the same rows and read the same data: nothing is broadcast. All randomness is the source's, and the only
state is the number of the next row. `prefetched` reads ahead on a thread of its own, without changing any batch.

Shape legend: B rows, N slots of a row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from megatron_dmtd.data.batches.batch import Batch
from megatron_dmtd.data.batches.rows import Row, RowSource

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


def collate(rows: Sequence[Row]) -> Batch:
    """Rows of packed documents as one batch, in order."""
    return Batch(
        tokens_BN=torch.from_numpy(np.stack([row.tokens_N for row in rows])),
        labels_BN=torch.from_numpy(np.stack([row.labels_N for row in rows])),
        loss_mask_BN=torch.from_numpy(np.stack([row.loss_mask_N for row in rows])),
        positions_BN=torch.from_numpy(np.stack([row.positions_N for row in rows])),
        document_lengths=tuple(row.document_lengths for row in rows),
    )


def batches(
    source: RowSource[RowT],
    *,
    make_batch: Callable[[Sequence[RowT]], BatchT],
    first_row: int,
    rows_of_batch: Callable[[int], int],
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    end_row: int | None = None,
) -> Iterator[BatchT]:
    """The rank's microbatches of the global batches from row `first_row` on.

    The global batch that begins at row i has `rows_of_batch(i)` rows. It gives every rank the same number of microbatches; in
    each, the ranks take `micro_batch_size` rows one after the other. `first_row` is the number of rows consumed so far by all
    ranks.

    Without `end_row` the batches never end: one epoch follows another. With it, the batches end before that row, and rows without
    a target complete the last global batch, so that all ranks take the same number of steps (a pass over a held-out corpus).
    `make_batch` makes a microbatch of its rows; for packed documents it is `collate`.
    """
    rows_of_all = micro_batch_size * data_parallel_size
    assert micro_batch_size > 0, micro_batch_size
    assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
    assert first_row >= 0, first_row

    def size_at(row: int) -> int:
        size = rows_of_batch(row)
        assert size > 0 and size % rows_of_all == 0, (
            f"global batch of {size} rows, {micro_batch_size} rows x {data_parallel_size} ranks"
        )
        return size

    def generate() -> Iterator[BatchT]:
        batch_begin = first_row
        while end_row is None or batch_begin < end_row:
            batch_end = batch_begin + size_at(batch_begin)
            for microbatch_begin in range(batch_begin, batch_end, rows_of_all):
                begin = microbatch_begin + data_parallel_rank * micro_batch_size
                indices = range(begin, begin + micro_batch_size)
                yield make_batch([source[i] if end_row is None or i < end_row else source.padding_row() for i in indices])
            batch_begin = batch_end

    size_at(first_row)  # now, not when the first batch is asked for
    return generate()


def prefetched(iterator: Iterator[BatchT], *, depth: int) -> Iterator[BatchT]:
    """The batches of `iterator`, up to `depth` of them prefetched by a thread, so that training waits for a slow disk only if it
    is behind by more than that. 0: no thread. An error while reading a batch is raised where that batch is requested.
    """
    return iterator if depth == 0 else _read_ahead(iterator, depth)


def _read_ahead(iterator: Iterator[BatchT], depth: int) -> Iterator[BatchT]:
    ready: queue.Queue[tuple[BatchT | None, BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: tuple[BatchT | None, BaseException | None]) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in iterator:
                put((batch, None))
                if stopped.is_set():
                    return
            put((None, None))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        stopped.set()
        thread.join()
