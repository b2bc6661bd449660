"""Microbatches of one data-parallel rank, in order, from any row on.

Global batch k of a run holds the rows k G to (k + 1) G - 1, however many ranks share them, so a run may be resumed on another
number of ranks. Tensor- and pipeline-parallel ranks of one replica ask for the same rows and read the same data: nothing is
broadcast. All randomness is the dataset's; there is no thread and no state but the next row.

Shape legend: B rows, N slots per row; G rows per global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_dmtd.data.batch import Batch
from megatron_dmtd.data.dataset import Row, RowSource


def collate(rows: Sequence[Row]) -> Batch:
    """The rows as one batch, in order."""
    return Batch(
        tokens_BN=torch.from_numpy(np.stack([row.tokens_N for row in rows])),
        labels_BN=torch.from_numpy(np.stack([row.labels_N for row in rows])),
        loss_mask_BN=torch.from_numpy(np.stack([row.loss_mask_N for row in rows])),
        positions_BN=torch.from_numpy(np.stack([row.positions_N for row in rows])),
        document_lengths=tuple(row.document_lengths for row in rows),
    )


def batches(
    dataset: RowSource,
    *,
    first_row: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    end_row: int | None = None,
) -> Iterator[Batch]:
    """The rank's microbatches of the global batches that start at rows `first_row`, `first_row + G`, and so on.

    Each global batch gives every rank the same number of microbatches, `G / (micro_batch_size * data_parallel_size)`. In each,
    the ranks take `micro_batch_size` rows one after the other. `first_row` is the number of rows consumed so far, by all ranks.

    Without `end_row` the batches never end: epochs roll over. With it, the batches end at the row before it, and rows without a
    target complete the last global batch, so that all ranks still take equally many steps (a pass over a held-out corpus).
    """
    rows_of_all = micro_batch_size * data_parallel_size
    assert micro_batch_size > 0 and global_batch_size > 0 and global_batch_size % rows_of_all == 0, (
        f"global batch of {global_batch_size} rows, {micro_batch_size} rows x {data_parallel_size} ranks"
    )
    assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
    assert first_row >= 0, first_row

    def generate() -> Iterator[Batch]:
        batch_begin = first_row
        while end_row is None or batch_begin < end_row:
            for microbatch_begin in range(batch_begin, batch_begin + global_batch_size, rows_of_all):
                begin = microbatch_begin + data_parallel_rank * micro_batch_size
                indices = range(begin, begin + micro_batch_size)
                yield collate([dataset[i] if end_row is None or i < end_row else dataset.padding_row() for i in indices])
            batch_begin += global_batch_size

    return generate()
