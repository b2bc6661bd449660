"""Geometry against slots counted by walking along documents."""

import subprocess
import sys

import numpy as np
import pytest

from megatron_dmtd.cycle import (
    documents,
    join,
    padded_document_lengths,
    positions,
    real_slots,
    require_whole_cycles,
    shadow_slots,
)
from megatron_dmtd.errors import DataError
from tests.oracles.visibility import walk


def test_positions_and_documents_restart_at_each_document():
    assert positions([3, 2]).tolist() == [0, 1, 2, 0, 1]
    assert documents([3, 2]).tolist() == [0, 0, 0, 1, 1]
    assert positions([3, 2]).dtype == documents([3, 2]).dtype == np.int64


def test_a_row_without_documents_has_no_slots():
    assert positions([]).shape == documents([]).shape == (0,)
    assert positions([]).dtype == documents([]).dtype == np.int64


@pytest.mark.parametrize("lengths", [[1], [4], [4, 8], [5, 1, 2], [1, 1, 1, 6]])
def test_slots_are_those_of_a_walk_along_the_documents(lengths):
    for stream, slots in (("real", real_slots(lengths)), ("shadow", shadow_slots(lengths))):
        walked = walk(stream, lengths, 4)
        assert slots.is_real.tolist() == [stream == "real"] * len(walked)
        assert slots.document.tolist() == [slot.document for slot in walked]
        assert slots.position.tolist() == [slot.position for slot in walked]


def test_join_puts_the_second_stream_after_the_first():
    both = join(real_slots([2]), shadow_slots([1, 1]))
    assert both.is_real.tolist() == [True, True, False, False]
    assert both.document.tolist() == [0, 0, 0, 1]
    assert both.position.tolist() == [0, 1, 0, 0]


def test_every_document_is_padded_on_its_own():
    assert padded_document_lengths([8, 5, 1, 4], 4) == (8, 8, 4, 4)
    assert padded_document_lengths([7, 2], 1) == (7, 2)
    assert padded_document_lengths([], 4) == ()


def test_rows_of_whole_cycles_are_accepted():
    require_whole_cycles([8, 4], 4)
    require_whole_cycles([8, 4], 4, row_length=12)
    require_whole_cycles(padded_document_lengths([7, 3], 5), 5, row_length=15)


@pytest.mark.parametrize("lengths", [[8, 6], [0], [4, -4]])
def test_a_document_cut_inside_a_cycle_is_refused_with_its_index(lengths):
    with pytest.raises(DataError, match=rf"document {len(lengths) - 1} of the row has {lengths[-1]} slots"):
        require_whole_cycles(lengths, 4)


def test_a_row_that_documents_do_not_fill_is_refused():
    with pytest.raises(DataError, match=r"8 \+ 4 = 12 slots"):
        require_whole_cycles([8, 4], 4, row_length=16)


def test_importing_the_cycle_room_brings_in_no_torch_and_no_matplotlib():
    code = (
        "import sys, megatron_dmtd.cycle as cycle\n"
        "cycle.mask_picture([5], variant='causal-refresh', cycle_length=4)\n"
        "print([name for name in ('numpy', 'torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['numpy']"
