"""Rows as a person reads them say what training reads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from megatron_dmtd.data.batches.blending import BlendedDataset
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.packing import PADDING
from megatron_dmtd.data.corpora.row_view import slot_lines, text_lines, to_html, view_row

ROOT = Path(__file__).parents[3]


class Letters:
    """A tokenizer whose id n is the n-th letter; 0 is a full stop, 26 a line break, 27 an escape."""

    def decode(self, ids, **_) -> str:
        return "".join("." if i == 0 else "\n" if i == 26 else "\x1b" if i == 27 else chr(96 + i) for i in ids)


def _rows(write_tokens, documents, *, packing="concatenate", seq_length=8, marks=None, name="corpus") -> PackedDataset:
    prefix = write_tokens(documents, name=name)
    if marks is not None:
        from tests.data.corpora.test_shown_rows import write_manifest

        write_tokens(marks, name=f"{name}.loss", dtype=np.uint8)
        write_manifest(prefix, loss="assistant", num_documents=len(documents), num_tokens=sum(map(len, documents)))
    return PackedDataset([prefix], seq_length=seq_length, cycle_length=4, pad_token_id=0, shuffle_seed=None, packing=packing)


def _view(rows, index=0):
    return view_row(rows, index, tokenizer=Letters(), cycle_length=4)


def test_running_text_shows_cycles_targets_padding_and_the_token_behind_a_cut(write_tokens):
    rows = _rows(write_tokens, [[1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 0], [10, 11, 12, 13, 14, 15, 16, 17, 18, 0]])
    first = list(text_lines(_view(rows), color=False))
    assert first == [
        "row 0 (epoch 0): 8 slots in 2 cycles, 1 documents or parts of them, 6 targets, 2 slots of padding",
        f"document 0 of {rows._files[0].prefix}, tokens 0 to 6: slots 0 to 7, positions 0 to 7, 6 targets",
        "|[a]bcd|ef→.··",
    ]
    second = list(text_lines(_view(rows, 1), color=False))
    assert second[2::2] == ["|[g]hi→.·", "|[j]klm→n"]
    assert "tokens 0 to 4: slots 4 to 7" in second[3]
    third = list(text_lines(_view(rows, 2), color=False))
    assert third[2] == "|[n]opq|r→.···" and "tokens 4 to 9" in third[1]


def test_every_slot_is_the_one_that_training_reads(write_tokens):
    documents = [[int(i) for i in np.random.default_rng(n).integers(1, 26, size=n % 7 + 2)] + [0] for n in range(12)]
    for packing in ("concatenate", "best-fit"):
        rows = _rows(write_tokens, documents, packing=packing, seq_length=16, name=packing)
        for index in range(rows.rows_per_epoch):
            row, view = rows[index], _view(rows, index)
            slots = [slot for part in view.parts for slot in part.slots]
            assert [slot.number for slot in slots] == list(range(16))
            for name, values in (("token_id", row.tokens_N), ("label_id", row.labels_N), ("position", row.positions_N)):
                assert [getattr(slot, name) for slot in slots] == values.tolist()
            assert [slot.has_loss for slot in slots] == (row.loss_mask_N > 0).tolist()
            assert [slot.phase for slot in slots] == (row.positions_N % 4).tolist()
            assert tuple(len(part.slots) for part in view.parts) == row.document_lengths
            for part in view.parts:
                if part.piece.document != PADDING:
                    held = documents[part.piece.document][part.piece.start :][: part.piece.num_inputs]
                    assert [slot.token_id for slot in part.slots if not slot.is_padding] == held
                    assert [slot.text for slot in part.slots][: len(held)] == [Letters().decode([i]) for i in held]


def test_marks_of_the_loss_decide_what_is_a_target(write_tokens):
    rows = _rows(write_tokens, [[1, 2, 3, 4, 5]], marks=[[0, 0, 1, 1, 0]])
    assert list(text_lines(_view(rows), color=False))[2::2] == ["|[a][b]cd→[e]", "|····"]
    table = list(slot_lines(_view(rows), color=False))
    assert [line.split()[-1] for line in table[3:7]] == ['"a"', '"c"', '"d"', '"d"']
    assert '"b" -> "c"' in table[4] and table[3].startswith("|") and table[4].startswith(" ")
    assert "(padding)" in table[-1]


def test_colours_are_used_only_where_they_are_asked_for_and_text_cannot_bring_its_own(write_tokens):
    rows = _rows(write_tokens, [[1, 27, 26, 4, 0]])
    plain, colored = ("\n".join(text_lines(_view(rows), color=color)) for color in (False, True))
    assert "\x1b" not in plain and r"[a]\x1b" in plain and "\nd→." in plain
    stripped = re.sub(r"\x1b\[\d+m", "", colored)
    assert "\x1b" not in stripped and stripped == plain.replace("[", "").replace("]", "")
    assert "\x1b[33m|\x1b[0m\x1b[90ma\x1b[0m" in colored
    assert "\x1b[90m" in "\n".join(slot_lines(_view(rows), color=True)) and r'"\n"' in "\n".join(
        slot_lines(_view(rows), color=False)
    )


def test_a_page_holds_every_slot_and_no_markup_of_the_text(write_tokens):
    class Markup(Letters):
        def decode(self, ids, **_):
            return "".join("<b>" if i == 1 else super(Markup, self).decode([i]) for i in ids)

    rows = _rows(write_tokens, [[1, 2, 3, 4, 0], [5, 6, 0]])
    page = to_html([view_row(rows, 0, tokenizer=Markup(), cycle_length=4)])
    assert page.startswith("<!doctype html>") and "<b>" not in page and "&lt;b&gt;" in page
    assert page.count("<span class=") == 8 + page.count('class="next"') and page.count('class="next"') == page.count("<h3>")
    assert "slot 0, position 0, phase 0, id 1, predicts &quot;b&quot; (2)" in page


def test_a_blend_shows_which_corpus_a_row_is_of(write_tokens):
    corpora = [_rows(write_tokens, [[n] * 9] * 4, name=f"corpus{n}") for n in (1, 2)]
    blend = BlendedDataset(corpora, [0.5, 0.5], seed=3)
    sources = {_view(blend, index).parts[0].source[-1] for index in range(4)}
    assert sources == {"1", "2"}
    for index in range(4):
        view = _view(blend, index)
        assert {slot.token_id for slot in view.parts[0].slots if not slot.is_padding} == {int(view.parts[0].source[-1])}
