import pytest
import torch

from megatron_dmtd.hf import dmtd_slots
from megatron_dmtd.hf.dmtd_slots import NOWHERE, Slots, Visibility, complete_layout, read_columns
from tests.hf.tiny import MASK_ID, random_ids, tiny_config, tiny_model

M = MASK_ID


def test_positions_count_from_the_first_token_after_the_padding():
    columns = read_columns(torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), None)
    assert columns.position_BW.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert columns.document_BW.tolist() == [[NOWHERE, NOWHERE, 0, 0, 0], [0] * 5]
    assert columns.lengths() == [3, 5]


def test_every_document_is_completed_to_whole_cycles_and_padding_is_left_out():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17], [0, 20, 21, 22, 23, 24, 30, 31]])
    mask = torch.tensor([[1] * 8, [0] + [1] * 7])
    position_ids = torch.tensor([[0, 0, 1, 2, 3, 0, 1, 2], [9, 0, 1, 2, 3, 4, 0, 1]])
    layout = complete_layout(ids, read_columns(ids, mask, position_ids), tiny_config("causal-refresh"))
    assert layout.tokens_BN.tolist() == [
        [10, M, M, M, 11, 12, 13, 14, 15, 16, 17, M],
        [20, 21, 22, 23, 24, M, M, M, 30, 31, M, M],
    ]
    assert layout.position_BN.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert layout.document_BN.tolist() == [[0] * 4 + [1] * 4 + [2] * 4, [0] * 8 + [1] * 4]
    assert layout.slot_of_column_BW.tolist() == [[0, 4, 5, 6, 7, 8, 9, 10], [0, 0, 1, 2, 3, 4, 8, 9]]
    taken = layout.take_columns(layout.tokens_BN[:, :, None])[:, :, 0]
    assert taken[0].tolist() == ids[0].tolist() and taken[1, 1:].tolist() == ids[1, 1:].tolist()


def test_the_end_of_a_shorter_row_is_a_document_that_no_token_reads():
    ids = torch.tensor([[0, 0, 0, 0, 0, 5], [1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 0, 0, 0, 1], [1] * 6])
    layout = complete_layout(ids, read_columns(ids, mask, None), tiny_config("causal-norefresh"))
    assert layout.document_BN.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8]
    assert layout.tokens_BN.tolist() == [[5, M, M, M, M, M, M, M], [1, 2, 3, 4, 5, 6, M, M]]


def test_rows_that_are_laid_out_alike_share_one_table():
    ids = random_ids(3, 6)
    layout = complete_layout(ids, read_columns(ids, None, None), tiny_config("causal-norefresh"))
    assert layout.tokens_BN.shape == (3, 8)
    assert layout.document_BN.shape == layout.position_BN.shape == (1, 8)


def test_merged_streams_see_what_section_7_3_draws():
    """Refresh of 4..7 and the bidirectional block 8..11, over a cache of 0..3."""
    position, document = torch.arange(4, 12)[None], torch.zeros(1, 4, dtype=torch.int64)
    real = Slots.of(document, position[:, :4], is_real=True)
    block = Slots.of(document, position[:, 4:], is_real=False)
    stored = Slots.of(document, torch.arange(4)[None], is_real=True)
    keys = stored.followed_by(real).followed_by(block)
    mask = Visibility(real.followed_by(block), keys, tiny_config("bidirectional-refresh")).mask(0, 8)
    rows = ["".join(str(int(seen)) for seen in row) for row in mask[0]]
    assert rows == [
        "111110000000",
        "111111000000",
        "111111100000",
        "111111110000",
        "111111111111",
        "111111111111",
        "111111111111",
        "111111111111",
    ]


@pytest.mark.parametrize("kept", [0, 10**9])
def test_long_inputs_are_attended_in_blocks_of_queries_with_the_same_result(monkeypatch, kept):
    model, ids = tiny_model("bidirectional-refresh"), random_ids(2, 23)
    whole = model(ids).logits
    monkeypatch.setattr(dmtd_slots, "QUERY_BLOCK", 5)
    monkeypatch.setattr(dmtd_slots, "KEPT_MASK_ELEMENTS", kept)
    made = []
    mask = Visibility.mask
    monkeypatch.setattr(Visibility, "mask", lambda self, *block: made.append(block) or mask(self, *block))
    torch.testing.assert_close(model(ids).logits, whole, rtol=0, atol=1e-11)
    # Blocks of two streams of 24 slots in layer 0, of the shadow stream alone in layer 1, of 23 columns in layers 2 and 3.
    assert len(made) == 10 + 5 + (5 if kept else 2 * 5)


@pytest.mark.parametrize(
    ("mask", "positions", "found"),
    [
        ([[1, 1]], None, r"attention_mask of shape \(1, 2\)"),
        ([[0, 0, 0, 0]], None, "a batch without tokens"),
        (None, [[1, 2, 3, 4]], r"position_ids\[0, 0\] = 1"),
        (None, [[0, 1, 1, 2]], r"position_ids\[0, 2\] = 1"),
        (None, [[0, 2, 3, 4]], r"position_ids\[0, 1\] = 2"),
        ([[0, 1, 1, 1]], [[0, 1, 2, 3]], r"position_ids\[0, 1\] = 1"),
    ],
)
def test_masks_and_positions_that_tell_no_documents_are_refused(mask, positions, found):
    mask = None if mask is None else torch.tensor(mask)
    positions = None if positions is None else torch.tensor(positions)
    with pytest.raises(ValueError, match=found):
        read_columns(torch.tensor([[1, 2, 3, 4]]), mask, positions)
