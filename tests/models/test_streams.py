from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_dmtd.architecture import Stream, make_schedule
from megatron_dmtd.attention import StreamLayout, make_backend
from megatron_dmtd.cycle import ORDINARY, Method
from megatron_dmtd.models.rotary import RotaryAngles
from megatron_dmtd.models.streams import MicrobatchStreams, select_rows
from tests.architecture.decoders import LAYER, decoder

REAL, SHADOW = Stream.REAL, Stream.SHADOW


def microbatch(method: Method) -> MicrobatchStreams:
    """Two rows of one document of eight slots."""
    positions_BN = torch.arange(8).expand(2, 8)
    layout = StreamLayout(positions_BN=positions_BN, document_lengths=((8,), (8,)), method=method)
    return MicrobatchStreams(backend=make_backend("masked", layout), angles=RotaryAngles(decoder().rotary_profiles)(positions_BN))


def test_rows_of_streams_lie_side_by_side() -> None:
    x_sb = torch.arange(12).view(1, 4, 3)
    both = (REAL, SHADOW)
    assert select_rows(x_sb, both, both) is x_sb
    assert torch.equal(select_rows(x_sb, both, (REAL,)), x_sb[:, :2])
    assert torch.equal(select_rows(x_sb, both, (SHADOW,)), x_sb[:, 2:])
    assert torch.equal(select_rows(x_sb, both, (SHADOW, REAL)), torch.cat((x_sb[:, 2:], x_sb[:, :2]), dim=1))


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        ("vanilla", [(2, 2)] * 4),
        ("causal-norefresh", [(2, 2)] * 4),
        ("bidirectional-refresh", [(4, 4), (2, 4), (2, 2), (2, 2)]),  # the real stream ends at the last parallel layer
    ],
)
def test_queries_and_keys_of_each_visit_have_an_angle_for_each_row(variant: str, rows: list[tuple[int, int]]) -> None:
    method = ORDINARY if variant == "vanilla" else Method(variant=variant, cycle_length=4, num_parallel_layers=2)
    streams, schedule = microbatch(method), make_schedule(decoder(), method)
    found = []
    for visit in schedule.visits:
        queries, keys = streams.at(visit).rotary_angles(LAYER.attention)
        assert all(torch.equal(part[:, row], keys[:, 0]) for part in (queries, keys) for row in range(part.shape[1]))
        found.append((queries.shape[1], keys.shape[1]))
    assert found == rows


def test_a_visit_says_which_streams_end_there() -> None:
    method = Method(variant="causal-refresh", cycle_length=4, num_parallel_layers=2)
    streams, visits = microbatch(method), make_schedule(decoder(), method).visits
    assert [streams.at(visit).ending for visit in visits] == [(), (REAL,), (), ()]
    with pytest.raises(AssertionError):
        streams.at(replace(visits[0], outputs=(REAL,), stored=REAL))  # the streams that leave are the last that enter
