"""Rows of a packed corpus by number: row i is the same on every rank, machine and layout, and after every restart.

Rows are numbered over all epochs, without end; documents, and the rows that they fill, are shuffled again for each epoch. Nothing
here is state: a run is resumed by the number of its next row. The loader decides which rank takes which row. With a cache,
everything that grows with the corpus is on disk and memory-mapped.

Shape legend: N slots of a row, U documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_dmtd.cycle import complete_length
from megatron_dmtd.data.batches.index_cache import Arrays, cached
from megatron_dmtd.data.batches.manifest import loss_prefix, read_manifest
from megatron_dmtd.data.batches.packing import (
    PADDING,
    BestFitPlan,
    EpochPlan,
    Packing,
    Piece,
    PlanCounts,
    epoch_order,
    packing_report,
)
from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.data.batches.token_file import TokenFile, token_file_paths
from megatron_dmtd.errors import ConfigError, DataError

#: limits of the check when a corpus is opened: documents per file, and tokens per document
_SAMPLED_DOCUMENTS = 64
_SAMPLED_TOKENS = 4096
#: loss marks that are read at once
_SCANNED_MARKS = 1 << 20
#: increased whenever the same corpus and settings would give a different plan
_PLAN_VERSION = 1


ReadTokens = Callable[[int, int, int], npt.NDArray[np.integer]]
"""(document, start, count) -> the tokens `start` to `start + count - 1` of the document."""


def fill_row(
    pieces: Sequence[Piece], read: ReadTokens, *, seq_length: int, pad_token_id: int, read_loss: ReadTokens | None = None
) -> Row:
    """The row that `pieces` describe, with `seq_length` slots. `read_loss` gives 1 for tokens that are targets; None: all are."""
    tokens_N = np.full(seq_length, pad_token_id, dtype=np.int64)
    labels_N = np.full(seq_length, pad_token_id, dtype=np.int64)
    loss_mask_N = np.zeros(seq_length, dtype=np.float32)
    positions_N = np.empty(seq_length, dtype=np.int64)
    at = 0
    for piece in pieces:
        positions_N[at : at + piece.num_slots] = np.arange(piece.num_slots)
        if piece.document != PADDING:
            ids = read(piece.document, piece.start, piece.num_inputs + 1)
            filled = slice(at, at + piece.num_inputs)
            tokens_N[filled], labels_N[filled], loss_mask_N[filled] = ids[:-1], ids[1:], 1.0
            if read_loss is not None:
                loss_mask_N[filled] = read_loss(piece.document, piece.start + 1, piece.num_inputs)
        at += piece.num_slots
    assert at == seq_length, (at, seq_length)
    return Row(
        tokens_N=tokens_N,
        labels_N=labels_N,
        loss_mask_N=loss_mask_N,
        positions_N=positions_N,
        document_lengths=tuple(piece.num_slots for piece in pieces),
    )


def _check_arguments(prefixes: Sequence[str], *, seq_length: int, cycle_length: int) -> None:
    if complete_length(seq_length, cycle_length) != seq_length or seq_length <= 0:
        raise ConfigError(
            found=f"rows of {seq_length} slots with cycles of {cycle_length}",
            required="rows of whole cycles",
            remedy="make the row length a multiple of the cycle length",
        )
    if not prefixes or isinstance(prefixes, str):
        raise ConfigError(found=f"prefixes = {prefixes!r}", required="a list of one or more token files", remedy="name a corpus")


def _open_marks(file: TokenFile) -> TokenFile | None:
    """The loss marks of a file, if there are any. Raises `DataError` if they are missing or belong to another file."""
    manifest = read_manifest(file.prefix)
    if manifest is None or manifest.loss == "all":
        return None
    marks = TokenFile(loss_prefix(file.prefix))
    if (len(marks), marks.num_tokens) != (len(file), file.num_tokens):
        raise DataError(
            found=f"loss marks for {len(marks)} documents and {marks.num_tokens} tokens in {marks.prefix}",
            required=f"the {len(file)} documents and {file.num_tokens} tokens of {file.prefix}",
            remedy="make the files again with tools/preprocess.py",
        )
    if not _has_target(marks):
        raise DataError(
            found=f"{file.prefix}: {len(file)} documents, and not one token that carries loss",
            required="targets: a run on this corpus would learn nothing, and weight decay would shrink its weights",
            remedy="check the roles of the chats, or make the files again without --assistant-loss",
        )
    return marks


def _has_target(marks: TokenFile) -> bool:
    """Whether any token is a target; a document's first token never is. Reads no further than the first."""
    for begin, end in marks.runs(_SCANNED_MARKS):
        marks_N = marks.tokens(begin, end).copy()
        lengths_U = marks.lengths(begin, end)
        marks_N[np.cumsum(lengths_U) - lengths_U] = 0
        if bool(marks_N.any()):
            return True
    return False


def _file_key(prefix: str) -> list[object]:
    """What distinguishes a token file from others of the same name, without reading it."""
    manifest = read_manifest(prefix)
    status = [path.stat() for path in token_file_paths(prefix)]
    return [os.path.abspath(prefix), *((one.st_size, one.st_mtime_ns) for one in status), manifest and manifest.bin_sha256]


class PackedDataset:
    """The documents of one or more token files, packed into rows."""

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        seq_length: int,
        cycle_length: int,
        pad_token_id: int,
        shuffle_seed: int | None,
        vocab_size: int | None = None,
        mask_token_id: int | None = None,
        packing: Packing = "concatenate",
        cache_dir: str | None = None,
    ) -> None:
        """Open `prefixes` as one corpus, in rows of `seq_length` slots, packed as `megatron_dmtd.data.batches.packing` says.

        The plan of an epoch is cached in `cache_dir` for every process that needs the same one; None keeps it in memory.
        `shuffle_seed` None keeps the documents in the order of the files (evaluation). With `vocab_size`, ids outside the
        vocabulary are refused (tensor-parallel ranks would silently embed them as zeros); with `mask_token_id`, texts that
        contain it: in a sample of each file now, and in every row when it is read.

        Raises:
            ConfigError: `seq_length` is not a multiple of `cycle_length`, or no prefix is given.
            DataError: a file is missing or damaged, no document has a target, or an id is refused.

        """
        _check_arguments(prefixes, seq_length=seq_length, cycle_length=cycle_length)
        self.seq_length = seq_length
        self.cycle_length = cycle_length
        self.pad_token_id = pad_token_id
        self.shuffle_seed = shuffle_seed
        self._vocab_size = vocab_size
        self._mask_token_id = mask_token_id
        self._packing: Packing = packing
        self._cache_dir = cache_dir
        self._files = [TokenFile(prefix) for prefix in prefixes]
        self._marks = [_open_marks(file) for file in self._files]
        self._first_document_of_file = np.cumsum([0] + [len(file) for file in self._files])
        for file in self._files:
            self._check_file(file)
        self._plans: dict[int, EpochPlan] = {}
        self.counts = self._plan(0).counts
        """Counts of the first epoch. Other epochs differ only in the number of documents that concatenation cuts."""
        if self.rows_per_epoch == 0:
            raise DataError(
                found=f"{self.num_documents} documents in {', '.join(prefixes)}, all of fewer than 2 tokens",
                required="a document with a token to predict",
                remedy="use another corpus",
            )

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every target of the corpus once. The same in every epoch."""
        return self.counts.num_rows

    @property
    def targets_per_epoch(self) -> int:
        """Slots of an epoch with a token to predict: tokens of the corpus less one per document, marked for loss or not."""
        return self.counts.num_targets

    @property
    def num_skipped_documents(self) -> int:
        """Documents of fewer than 2 tokens, which have no target and lie in no row."""
        return self.counts.num_skipped

    def report(self) -> str:
        """Rows, share of padding and share of documents cut, in words."""
        return packing_report(self.counts, seq_length=self.seq_length)

    @property
    def num_documents(self) -> int:
        """Documents of the corpus, those without a target included."""
        return int(self._first_document_of_file[-1])

    def __getitem__(self, index: int) -> Row:
        """Row `index`, counted over all epochs. Raises `DataError` if it holds an id that is refused."""
        assert index >= 0, index
        epoch, row = divmod(index, self.rows_per_epoch)
        pieces = self._plan(epoch).row(row)
        read_loss = self._read_loss if any(marks is not None for marks in self._marks) else None
        return fill_row(pieces, self._read, seq_length=self.seq_length, pad_token_id=self.pad_token_id, read_loss=read_loss)

    def pieces(self, index: int) -> list[tuple[str, Piece]]:
        """What row `index` is made of: of each piece the prefix of its token file (empty for padding), and the piece, whose
        document is numbered as in that file.
        """
        epoch, row = divmod(index, self.rows_per_epoch)
        found = []
        for piece in self._plan(epoch).row(row):
            if piece.document == PADDING:
                found.append(("", piece))
            else:
                nth, in_file = self._place(piece.document)
                found.append((self._files[nth].prefix, replace(piece, document=in_file)))
        return found

    def padding_row(self) -> Row:
        """A row without a target: what fills the last batch of an evaluation."""
        pieces = [Piece(document=PADDING, start=0, num_inputs=0, num_slots=self.seq_length)]
        return fill_row(pieces, self._read, seq_length=self.seq_length, pad_token_id=self.pad_token_id)

    def _plan(self, epoch: int) -> EpochPlan:
        if self.shuffle_seed is None:
            epoch = 0  # all epochs are alike
        if epoch not in self._plans:
            plan = self._cached_plan(epoch)
            while len(self._plans) >= 2:  # a batch may straddle two epochs
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = plan
        return self._plans[epoch]

    def _cached_plan(self, epoch: int) -> EpochPlan:
        if self._cache_dir is None:
            return self._build_plan(epoch)

        def build() -> tuple[Arrays, dict[str, int]]:
            plan = self._build_plan(epoch)
            return plan.arrays, asdict(plan.counts)

        arrays, numbers = cached(Path(self._cache_dir), self._cache_key(epoch), build)
        counts = PlanCounts(**numbers)
        return self._plan_type.restore(arrays, counts, seq_length=self.seq_length, cycle_length=self.cycle_length)

    def _cache_key(self, epoch: int) -> dict[str, object]:
        return {
            "version": _PLAN_VERSION,
            "files": [_file_key(file.prefix) for file in self._files],
            "packing": self._packing,
            "seq_length": self.seq_length,
            "cycle_length": self.cycle_length,
            "shuffle_seed": self.shuffle_seed,
            "epoch": epoch,
        }

    def _build_plan(self, epoch: int) -> EpochPlan:
        lengths_U = np.concatenate([file.document_lengths_U for file in self._files])
        order_U = epoch_order(self.num_documents, shuffle_seed=self.shuffle_seed, epoch=epoch)
        rows = partial(epoch_order, shuffle_seed=self.shuffle_seed, epoch=epoch, stream=1)
        return self._plan_type(
            lengths_U,
            order_U,
            seq_length=self.seq_length,
            cycle_length=self.cycle_length,
            row_order=None if self.shuffle_seed is None else rows,
        )

    @property
    def _plan_type(self) -> type[EpochPlan]:
        return BestFitPlan if self._packing == "best-fit" else EpochPlan

    def _place(self, document: int) -> tuple[int, int]:
        """The file that holds a document of the corpus, and its number there."""
        nth = int(np.searchsorted(self._first_document_of_file, document, side="right")) - 1
        return nth, document - int(self._first_document_of_file[nth])

    def _read_loss(self, document: int, start: int, count: int) -> npt.NDArray[np.integer]:
        nth, in_file = self._place(document)
        marks = self._marks[nth]
        return np.ones(count, dtype=np.uint8) if marks is None else marks.read(in_file, start, count)

    def _read(self, document: int, start: int, count: int) -> npt.NDArray[np.integer]:
        nth, in_file = self._place(document)
        file = self._files[nth]
        ids = file.read(in_file, start, count)
        self._check_ids(ids, where=f"document {in_file} of {file.prefix}")
        return ids

    def _check_file(self, file: TokenFile) -> None:
        manifest = read_manifest(file.prefix)
        if manifest is not None and self._vocab_size is not None and manifest.max_token_id >= self._vocab_size:
            self._refuse_id(manifest.max_token_id, where=file.prefix)
        sample = np.unique(np.linspace(0, len(file) - 1, num=min(len(file), _SAMPLED_DOCUMENTS), dtype=np.int64))
        for document in sample.tolist():
            count = min(int(file.lengths(document, document + 1)[0]), _SAMPLED_TOKENS)
            self._check_ids(file.read(document, 0, count), where=f"document {document} of {file.prefix}")

    def _check_ids(self, ids: npt.NDArray[np.integer], *, where: str) -> None:
        if ids.size == 0:
            return
        if self._vocab_size is not None:
            for extreme in (int(ids.min()), int(ids.max())):
                if not 0 <= extreme < self._vocab_size:
                    self._refuse_id(extreme, where=where)
        if self._mask_token_id is not None and bool((ids == self._mask_token_id).any()):
            raise DataError(
                found=f"the MASK id {self._mask_token_id} in {where}",
                required="text without it: MASK stands for a token not yet known",
                remedy="tokenise the corpus with this mask_token_id (tools/preprocess.py), or choose an id that no text holds",
            )

    def _refuse_id(self, token_id: int, *, where: str) -> None:
        raise DataError(
            found=f"token id {token_id} in {where}",
            required=f"ids from 0 to {self._vocab_size} - 1, the vocabulary of the model",
            remedy="tokenise the corpus with the model's tokenizer, or correct model.vocab_size",
        )
