"""Several corpora in given proportions, row by row, without an index: where row i comes from is computed, not stored.

The corpora are halved again and again; at each halving, row n of the part goes left exactly when floor(n p + o) steps up, where p
is the left half's share and o an offset drawn from the seed. This is exact integer arithmetic: after any number of rows each
corpus has contributed its share, up to one row per halving, and nothing drifts, whatever the weights. Any row can be requested at
any time, so a run is resumed by the number of its next row, on any number of ranks. Each corpus counts its own rows and shuffles
its own epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.packing import Piece
from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.infra.digests import stable_hash


def exact_shares(weights: Sequence[float]) -> list[Fraction]:
    """The weights as exact shares of their sum; 0.1 means one tenth. Raises `ConfigError` unless all are positive numbers."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                found=f"the weight {weight} of a corpus",
                required="positive numbers",
                remedy="correct it, or leave the corpus out",
            )
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


class Schedule:
    """Which corpus gives row i, and which of its rows that is."""

    def __init__(self, shares: Sequence[Fraction], *, seed: int) -> None:
        """`shares` add up to 1; `seed` shifts each corpus's turns within the sequence."""
        assert sum(shares) == 1, shares
        self._shares = list(shares)
        self._seed = seed
        self._halves: dict[tuple[int, int], tuple[int, int, int]] = {}

    def __len__(self) -> int:
        """Number of corpora."""
        return len(self._shares)

    def place(self, index: int) -> tuple[int, int]:
        """Corpus of row `index`, and the row's number in it. Every row of every corpus occurs exactly once, in order."""
        begin, end = 0, len(self._shares)
        while end - begin > 1:
            middle = (begin + end) // 2
            before, after = self._num_left(begin, end, index), self._num_left(begin, end, index + 1)
            if after > before:
                end, index = middle, before
            else:
                begin, index = middle, index - before
        return begin, index

    def _num_left(self, begin: int, end: int, num_rows: int) -> int:
        """Rows of the left half among the first `num_rows` of the corpora `begin` to `end - 1`."""
        numerator, denominator, offset = self._half(begin, end)
        return (num_rows * numerator + offset) // denominator

    def _half(self, begin: int, end: int) -> tuple[int, int, int]:
        """Share of the left half as a fraction, and the offset in units of its denominator."""
        if (begin, end) not in self._halves:
            left = sum(self._shares[begin : (begin + end) // 2], Fraction())
            share = left / sum(self._shares[begin:end], Fraction())
            offset = stable_hash(f"{self._seed} {begin} {end}") * share.denominator >> 64
            self._halves[begin, end] = share.numerator, share.denominator, offset
        return self._halves[begin, end]


class BlendedDataset:
    """Rows of several corpora in given proportions."""

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[float], *, seed: int) -> None:
        """`weights` are shares of the rows, one per corpus, and need not add up to 1.

        Raises `ConfigError` unless there is one positive weight for each corpus.
        """
        if len(datasets) != len(weights):
            raise ConfigError(
                found=f"{len(weights)} weights for {len(datasets)} corpora", required="one weight per corpus", remedy="name both"
            )
        self.datasets = list(datasets)
        self.shares = exact_shares(weights)
        """Share of each corpus in the rows."""
        self._schedule = Schedule(self.shares, seed=seed)

    def __getitem__(self, index: int) -> Row:
        """Row `index` of the blend."""
        assert index >= 0, index
        corpus, row = self._schedule.place(index)
        return self.datasets[corpus][row]

    def pieces(self, index: int) -> list[tuple[str, Piece]]:
        """What row `index` of the blend is made of: see `PackedDataset.pieces`."""
        corpus, row = self._schedule.place(index)
        return self.datasets[corpus].pieces(row)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one epoch of each corpus, together; by weight, some are read more often than others."""
        return sum(dataset.rows_per_epoch for dataset in self.datasets)

    @property
    def targets_per_epoch(self) -> int:
        """Slots with a token to predict of one epoch of each corpus, together."""
        return sum(dataset.targets_per_epoch for dataset in self.datasets)

    def padding_row(self) -> Row:
        """A row without a target."""
        return self.datasets[0].padding_row()

    def report(self, num_rows: int) -> list[str]:
        """For each corpus: its packing, and how many epochs of it the first `num_rows` rows are."""
        lines = []
        for share, dataset in zip(self.shares, self.datasets):
            epochs = num_rows * float(share) / dataset.rows_per_epoch
            lines.append(f"{100 * float(share):.4g} % of the rows, {epochs:.3g} epochs: {dataset.report()}")
        return lines


def open_blend(
    open_corpus: Callable[[tuple[str, ...]], PackedDataset], prefixes: Sequence[str], weights: Sequence[float], *, seed: int
) -> PackedDataset | BlendedDataset:
    """The token files as one corpus or, with `weights`, as corpora of their own that are blended."""
    if not weights:
        return open_corpus(tuple(prefixes))
    return BlendedDataset([open_corpus((prefix,)) for prefix in prefixes], weights, seed=seed)
