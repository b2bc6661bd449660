"""Pictures: literal ones, and the grid against docs/method.md."""

import sys

import numpy as np
import pytest

from megatron_dmtd.cycle import VARIANTS, decoding_grid, decoding_picture, history_picture, mask_grid, mask_picture, save_mask_png
from megatron_dmtd.cycle.picture import HEAD_COLOUR, MASK_COLOUR, REAL_COLOUR, UNSEEN_COLOUR, colours, legend
from megatron_dmtd.errors import CapabilityError
from tests.oracles.visibility import may_read, walk


@pytest.mark.parametrize(
    ("variant", "picture"),
    [
        ("vanilla", "[1111] [1111] [1111]"),
        ("causal-norefresh", "[1000] [1000] [1000]"),
        ("causal-refresh", "[1111] [1111] [1000]"),
        ("bidirectional-norefresh", "[1000] [1000] [1000]"),
        ("bidirectional-refresh", "[1111] [1111] [1000]"),
    ],
)
def test_history_picture_is_that_of_the_specification(variant, picture):
    assert history_picture(12, variant=variant, cycle_length=4) == picture
    assert history_picture(9, variant=variant, cycle_length=4) == picture


def test_history_picture_of_other_cycle_lengths():
    assert history_picture(5, variant="causal-refresh", cycle_length=2) == "[11] [11] [10]"
    assert history_picture(2, variant="causal-norefresh", cycle_length=1) == "[1] [1]"
    assert history_picture(1, variant="bidirectional-refresh", cycle_length=3) == "[100]"


@pytest.mark.parametrize(
    ("variant", "window", "picture"),
    [
        ("vanilla", 6, "[11] [1111]"),
        ("causal-norefresh", 6, "[00] [1000]"),
        ("causal-refresh", 6, "[11] [1000]"),
        ("causal-refresh", 8, "[1111] [1000]"),
        ("bidirectional-refresh", 3, "[000]"),
    ],
)
def test_history_picture_under_a_window_keeps_cycles_apart(variant, window, picture):
    assert history_picture(12, variant=variant, cycle_length=4, window=window) == picture


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("cycle_length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mask_grid_is_the_specification(variant, cycle_length, window):
    lengths = [2 * cycle_length, cycle_length]
    slots = walk("shadow", lengths, cycle_length)
    if variant.endswith("-refresh"):
        slots = walk("real", lengths, cycle_length) + slots
    want = [[may_read(query, key, variant, window) for key in slots] for query in slots]
    assert mask_grid(lengths, variant=variant, cycle_length=cycle_length, window=window).sees.tolist() == want


def test_mask_grid_completes_each_document():
    grid = mask_grid([5, 1], variant="vanilla", cycle_length=4)
    assert grid.keys.document.tolist() == [0] * 8 + [1] * 4
    assert grid.queries.is_real.all()
    assert np.array_equal(grid.sees[:8, :8], np.tril(np.ones((8, 8), dtype=bool)))
    assert not grid.sees[8:, :8].any()


def test_mask_picture_literally():
    picture = mask_picture([4, 2], variant="bidirectional-refresh", cycle_length=2)
    assert picture.splitlines() == [
        "   reads stream  rr rr rr  |  ss ss ss",
        "       document  00 00 11  |  00 00 11",
        "x token, M MASK  xx xx xx  |  xM xM xM",
        "       position  01 23 01  |  01 23 01",
        "",
        "real   0   x0    #. .. ..  |  .. .. ..",
        "real   0   x1    ## .. ..  |  .. .. ..",
        "",
        "real   0   x2    ## #. ..  |  .. .. ..",
        "real   0   x3    ## ## ..  |  .. .. ..",
        "",
        "real   1   x0    .. .. #.  |  .. .. ..",
        "real   1   x1    .. .. ##  |  .. .. ..",
        "",
        "shadow 0   x0    .. .. ..  |  ## .. ..",
        "shadow 0   M1    .. .. ..  |  ## .. ..",
        "",
        "shadow 0   x2    ## .. ..  |  .. ## ..",
        "shadow 0   M3    ## .. ..  |  .. ## ..",
        "",
        "shadow 1   x0    .. .. ..  |  .. .. ##",
        "shadow 1   M1    .. .. ..  |  .. .. ##",
    ]


def test_the_merged_forward_of_a_refresh_variant_literally():
    """docs/method.md, section 7.3: refresh queries are causal and see no shadow; shadow queries see cache, refresh and block."""
    assert decoding_picture(2, variant="bidirectional-refresh", cycle_length=4).splitlines() == [
        "   reads stream  rrrr rrrr  |  ssss",
        "       document  0000 0000  |  0000",
        "x token, M MASK  xxxx xxxx  |  xMMM",
        "       position  0123 4567  |  8901",
        "",
        "real   0   x4    #### #...  |  ....",
        "real   0   x5    #### ##..  |  ....",
        "real   0   x6    #### ###.  |  ....",
        "real   0   x7    #### ####  |  ....",
        "",
        "shadow 0   x8    #### ####  |  ####",
        "shadow 0   M9    #### ####  |  ####",
        "shadow 0   M10   #### ####  |  ####",
        "shadow 0   M11   #### ####  |  ####",
    ]


@pytest.mark.parametrize("cycle_length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_that_begins_a_cycle_computes_its_block_and_the_refresh_before_it(variant, cycle_length):
    refreshes = variant.endswith("-refresh")
    for cycle in range(4):
        grid = decoding_grid(cycle, variant=variant, cycle_length=cycle_length)
        real = walk("real", [(cycle + 1) * cycle_length], cycle_length)
        shadow = walk("shadow", [(cycle + 1) * cycle_length], cycle_length)
        queries = [slot for slot in real if refreshes and slot.cycle == cycle - 1] + [
            slot for slot in shadow if slot.cycle == cycle
        ]
        assert len(queries) == cycle_length * (2 if refreshes and cycle > 0 else 1)
        if refreshes:
            keys = [slot for slot in real if slot.cycle < cycle] + [slot for slot in shadow if slot.cycle == cycle]
        else:
            keys = shadow
        assert grid.queries.position.tolist() == [slot.position for slot in queries]
        assert grid.keys.position.tolist() == [slot.position for slot in keys]
        assert grid.sees.tolist() == [[may_read(query, key, variant) for key in keys] for query in queries]


def test_mask_picture_of_causal_blocks_differs_inside_the_block_only():
    causal, bidirectional = (
        mask_picture([4], variant=f"{block}-norefresh", cycle_length=2).splitlines() for block in ("causal", "bidirectional")
    )
    differing = [pair for pair in zip(causal, bidirectional, strict=True) if pair[0] != pair[1]]
    assert differing == [
        ("shadow 0   x0    #. ..", "shadow 0   x0    ## .."),
        ("shadow 0   x2    ## #.", "shadow 0   x2    ## ##"),
    ]


@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_a_png_is_written_whole_and_leaves_nothing_else(tmp_path, variant):
    path = tmp_path / "mask.png"
    path.write_bytes(b"old")
    save_mask_png(path, [4, 3], variant=variant, cycle_length=4)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and len(path.read_bytes()) > 1000
    assert [entry.name for entry in tmp_path.iterdir()] == ["mask.png"]


def test_the_coloured_areas_of_a_png_count_the_real_head_and_mask_keys_seen(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "mask.png"
    save_mask_png(path, [8, 4], variant="bidirectional-refresh", cycle_length=4)
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    area = {colour: (pixels == colour).all(axis=1).sum() for colour in (HEAD_COLOUR, MASK_COLOUR, REAL_COLOUR)}
    cell = area[HEAD_COLOUR] / 12
    assert cell > 100
    # Lines between cycles cover some of the cells.
    assert area[MASK_COLOUR] / cell == pytest.approx(12 * 3, rel=0.1)
    assert area[REAL_COLOUR] / cell == pytest.approx(8 * 9 // 2 + 4 * 5 // 2 + 4 * 4, rel=0.1)


@pytest.mark.parametrize(
    ("variant", "meant"),
    [
        ("vanilla", {REAL_COLOUR, UNSEEN_COLOUR}),
        ("causal-norefresh", {HEAD_COLOUR, MASK_COLOUR, UNSEEN_COLOUR}),
        ("bidirectional-refresh", {REAL_COLOUR, HEAD_COLOUR, MASK_COLOUR, UNSEEN_COLOUR}),
    ],
)
def test_a_png_has_a_legend_of_the_colours_in_it_and_no_others(tmp_path, variant, meant):
    from matplotlib.image import imread

    grid = mask_grid([8, 4], variant=variant, cycle_length=4)
    assert legend(colours(grid)).keys() == meant
    assert legend(colours(grid))[UNSEEN_COLOUR] == "does not read it"
    path = tmp_path / "mask.png"
    save_mask_png(path, [8, 4], variant=variant, cycle_length=4)
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    # below the axes, whose black frame is the longest line
    frame = (pixels == 0).all(axis=2).sum(axis=1)
    below = pixels[np.flatnonzero(frame > 0.5 * frame.max()).max() + 5 :].reshape(-1, 3)
    drawn = {colour for colour in (REAL_COLOUR, HEAD_COLOUR, MASK_COLOUR) if (below == colour).all(axis=1).sum() > 30}
    assert drawn == meant - {UNSEEN_COLOUR}


def test_a_png_without_matplotlib_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CapabilityError, match="pip install matplotlib"):
        save_mask_png(tmp_path / "mask.png", [4], variant="vanilla", cycle_length=4)
    assert list(tmp_path.iterdir()) == []
