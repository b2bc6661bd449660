"""Shards partition the blocks of a source, in order, whatever the sizes of its inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dmtd.data.corpora.inputs import EntriesBlock
from megatron_dmtd.data.corpora.shards import make_shard, source_sha256


class Sized:
    """An input of blocks of given sizes; without a size of its own if `known` is false."""

    def __init__(self, name, sizes, *, known=True):
        self.name = self.description = name
        self.sizes = sizes
        self.num_bytes = sum(sizes) if known else 0
        self.passes = 0

    def blocks(self, _):
        self.passes += 1
        return iter([EntriesBlock(documents=(), num_bytes=size) for size in self.sizes])


def drawn(inputs, index, count):
    shard = make_shard(inputs, index=index, count=count)
    return [(shard.first_input + nth, number) for nth, number, _ in shard.blocks(1)]


def whole(inputs):
    return [(nth, number) for nth, one in enumerate(inputs) for number in range(len(one.sizes))]


SIZES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=8)


@given(sizes=SIZES, count=st.integers(1, 10))
def test_shards_one_after_the_other_are_the_whole(sizes, count):
    inputs = [Sized(str(nth), some) for nth, some in enumerate(sizes)]
    assert [block for index in range(count) for block in drawn(inputs, index, count)] == whole(inputs)
    assert {make_shard(inputs, index=index, count=count).order for index in range(count)} == {"parts"}


@given(sizes=SIZES, count=st.integers(1, 8))
def test_with_enough_inputs_each_shard_reads_some_whole_ones_and_no_other(sizes, count):
    inputs = [Sized(str(nth), some) for nth, some in enumerate(sizes)]
    if len(inputs) < count:
        return
    for index in range(count):
        assert drawn(inputs, index, count)
    assert [one.passes for one in inputs] == [1] * len(inputs)


def test_whole_inputs_are_shared_evenly_by_size():
    inputs = [Sized(str(nth), [size]) for nth, size in enumerate([90, 10, 10, 80, 30, 60])]
    assert [drawn(inputs, index, 3) for index in range(3)] == [[(0, 0)], [(1, 0), (2, 0), (3, 0)], [(4, 0), (5, 0)]]
    assert [drawn(inputs[:3], index, 3) for index in range(3)] == [[(0, 0)], [(1, 0)], [(2, 0)]], "none is left without"


def test_one_input_is_cut_where_the_shares_of_its_bytes_lie():
    inputs = [Sized("a", [10] * 8)]
    assert [[number for _, number in drawn(inputs, index, 3)] for index in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_inputs_of_unknown_size_are_cut_between_inputs_or_dealt_out_by_block():
    inputs = [Sized("a", [1] * 5, known=False), Sized("b", [1] * 3, known=False)]
    assert [drawn(inputs, index, 2) for index in range(2)] == [[(0, n) for n in range(5)], [(1, n) for n in range(3)]]
    shard = make_shard(inputs[:1], index=1, count=2)
    assert shard.order == "blocks" and shard.num_bytes == 0
    assert drawn(inputs[:1], 1, 2) == [(0, 1), (0, 3)]


@pytest.mark.parametrize("start", [(0, 0), (0, 3), (1, 1)])
def test_a_shard_goes_on_at_any_block(start):
    shard = make_shard([Sized("a", [7] * 5), Sized("b", [7] * 5)], index=0, count=1)
    rest = [(nth, number) for nth, number, _ in shard.blocks(1, first_input=start[0], first_block=start[1])]
    assert rest == [block for block in whole(shard.inputs) if block >= start] and rest


def test_a_source_is_known_by_names_and_sizes():
    inputs = [Sized("a", [1, 2])]
    assert source_sha256(inputs) == source_sha256([Sized("a", [2, 1])])
    assert len({source_sha256(some) for some in (inputs, [Sized("b", [1, 2])], [Sized("a", [1, 3])], inputs * 2)}) == 4
