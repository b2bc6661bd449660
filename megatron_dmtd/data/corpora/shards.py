"""Which part of the inputs one of N runs reads, so that the concatenated shards are what a single run writes.

With at least as many inputs as shards, each shard covers whole consecutive inputs, and its run touches no others. With fewer,
inputs are cut between blocks, by the share of bytes that precedes a block; each run then passes through all inputs, to name
documents and compute checksums as every other run does. Inputs of unknown size cannot be cut so: their blocks are dealt out
in turn, and the shards cannot be joined in order.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal

from megatron_dmtd.data.corpora.inputs import Block, Input
from megatron_dmtd.infra.digests import sha256_of_text

#: `parts`: shards follow each other. `blocks`: every N-th block.
Order = Literal["parts", "blocks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one of `count` runs over the same inputs reads."""

    inputs: tuple[Input, ...]
    """The inputs that it passes through."""
    first_input: int
    """Number of the first of them among all."""
    index: int
    count: int
    order: Order
    whole_inputs: bool
    """Whether all blocks of `inputs` are its own."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of its blocks; 0 if unknown."""
        sizes = [one.num_bytes for one in self.inputs]
        return sum(sizes) // (1 if self.whole_inputs else self.count) if all(sizes) else 0

    def blocks(self, block_bytes: int, *, first_input: int = 0, first_block: int = 0) -> Iterator[tuple[int, int, Block]]:
        """Its blocks from block `first_block` of its input `first_input` on, with the numbers of both."""
        begins = [0, *accumulate(one.num_bytes for one in self.inputs)]
        for nth in range(first_input, len(self.inputs)):
            position = begins[nth]
            skipped = first_block if nth == first_input else 0
            for number, block in enumerate(self.inputs[nth].blocks(block_bytes)):
                is_own = self._owns(number, position=position, total=begins[-1])
                position += block.num_bytes
                if number >= skipped and is_own:
                    yield nth, number, block

    def _owns(self, number: int, *, position: int, total: int) -> bool:
        if self.whole_inputs:
            return True
        owner = number % self.count if self.order == "blocks" else min(position * self.count // total, self.count - 1)
        return owner == self.index


def make_shard(inputs: Sequence[Input], *, index: int, count: int) -> Shard:
    """The `index`-th of `count` shards of `inputs`."""
    sizes = [one.num_bytes for one in inputs]
    if len(inputs) < count:
        order: Order = "parts" if all(sizes) else "blocks"
        return Shard(inputs=tuple(inputs), first_input=0, index=index, count=count, order=order, whole_inputs=False)
    bounds = _bounds(sizes if all(sizes) else [1] * len(sizes), count)
    own = islice(inputs, bounds[index], bounds[index + 1])
    return Shard(inputs=tuple(own), first_input=bounds[index], index=index, count=count, order="parts", whole_inputs=True)


def _bounds(sizes: Sequence[int], count: int) -> list[int]:
    """Start of each of `count` shards of at least one input, and the end of the last: as even as whole inputs allow."""
    begins = [0, *accumulate(sizes)]
    bounds = [0]
    for nth in range(1, count):
        ideal = begins[-1] * nth / count
        after = bisect.bisect_left(begins, ideal)
        nearest = after if begins[after] - ideal <= ideal - begins[after - 1] else after - 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - (count - nth)))
    return [*bounds, len(sizes)]


def source_sha256(inputs: Sequence[Input]) -> str:
    """Digest of the names and sizes of all inputs, which determine how they are cut. Paths do not matter."""
    return sha256_of_text(json.dumps([[one.description, one.num_bytes] for one in inputs]))
