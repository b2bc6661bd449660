"""Rows of a packed corpus as a person reads them: text, borders of documents, cycles, targets and padding.

A slot holds a token, and its loss is that of the token after it. So a token is a *target* if the slot before it carries loss; the
first one of a document, or of the part that a row holds, never is. Lines are plain or coloured; `to_html` makes a page.

Shape legend: N slots of a row.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dmtd.cycle import is_cycle_head, phase
from megatron_dmtd.data.batches.packing import PADDING, Piece
from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.data.corpora.token_texts import token_texts

PAD_MARK = "·"
_COLORS = {"head": "\x1b[33m", "quiet": "\x1b[90m", "title": "\x1b[1m", "next": "\x1b[4m"}
_RESET = "\x1b[0m"
_STYLE = """
body { font: 14px/1.7 ui-monospace, monospace; margin: 2em; background: #fff; color: #111; white-space: pre-wrap }
h2, h3 { font-size: 1em; margin: 1.2em 0 .2em }
.quiet { color: #999 } .pad { color: #ccc } .next { text-decoration: underline dotted }
.head { border-left: 2px solid #d08700; padding-left: 1px }
"""


class PackedRows(Protocol):
    """A corpus whose rows can be shown: `PackedDataset`, or a blend of them."""

    @property
    def rows_per_epoch(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...

    def pieces(self, index: int) -> list[tuple[str, Piece]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One slot of a row."""

    number: int
    position: int
    """In the document's part, from 0."""
    phase: int
    token_id: int
    text: str
    label_id: int
    label: str
    has_loss: bool
    is_target: bool
    """Whether the slot before it is trained to predict its token."""
    is_padding: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The slots of a row that hold a part of one document, or padding alone."""

    source: str
    """Prefix of the token file; empty for padding."""
    piece: Piece
    slots: tuple[Slot, ...]

    @property
    def num_targets(self) -> int:
        """Slots with loss."""
        return sum(slot.has_loss for slot in self.slots)

    def title(self) -> str:
        """Where the slots come from, in words."""
        first, last = self.slots[0].number, self.slots[-1].number
        where = f"slots {first} to {last}, positions 0 to {self.slots[-1].position}"
        if self.piece.document == PADDING:
            return f"padding: {where}"
        tokens = f"tokens {self.piece.start} to {self.piece.start + self.piece.num_inputs}"
        return f"document {self.piece.document} of {self.source}, {tokens}: {where}, {self.num_targets} targets"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowView:
    """One row."""

    number: int
    """Counted over all epochs."""
    epoch: int
    cycle_length: int
    parts: tuple[Part, ...]

    def title(self) -> str:
        """Its contents, in words."""
        slots = [slot for part in self.parts for slot in part.slots]
        documents = sum(part.piece.document != PADDING for part in self.parts)
        return (
            f"row {self.number} (epoch {self.epoch}): {len(slots)} slots in {len(slots) // self.cycle_length} cycles, "
            f"{documents} documents or parts of them, {sum(slot.has_loss for slot in slots)} targets, "
            f"{sum(slot.is_padding for slot in slots)} slots of padding"
        )


def view_row(rows: PackedRows, index: int, *, tokenizer: Any, cycle_length: int) -> RowView:
    """Row `index`, read as training reads it."""
    row, parts, at = rows[index], [], 0
    for source, piece in rows.pieces(index):
        parts.append(Part(source=source, piece=piece, slots=_slots(row, piece, at, tokenizer, cycle_length)))
        at += piece.num_slots
    return RowView(number=index, epoch=index // rows.rows_per_epoch, cycle_length=cycle_length, parts=tuple(parts))


def _slots(row: Row, piece: Piece, at: int, tokenizer: Any, cycle_length: int) -> tuple[Slot, ...]:
    part = slice(at, at + piece.num_slots)
    tokens, labels = row.tokens_N[part].tolist(), row.labels_N[part].tolist()
    losses, positions = (row.loss_mask_N[part] > 0).tolist(), row.positions_N[part].tolist()
    texts = token_texts(tokenizer, [*tokens[: piece.num_inputs], *labels[piece.num_inputs - 1 : piece.num_inputs]])
    texts += [""] * (piece.num_slots + 1 - len(texts))
    return tuple(
        Slot(
            number=at + slot,
            position=positions[slot],
            phase=phase(positions[slot], cycle_length),
            token_id=tokens[slot],
            text=texts[slot],
            label_id=labels[slot],
            label=texts[slot + 1],
            has_loss=losses[slot],
            is_target=slot > 0 and losses[slot - 1],
            is_padding=slot >= piece.num_inputs,
        )
        for slot in range(piece.num_slots)
    )


def _visible(text: str) -> str:
    """Text that moves no cursor and changes no colour: control characters but the newline are spelt out."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _painted(text: str, kind: str, *, color: bool) -> str:
    return f"{_COLORS[kind]}{text}{_RESET}" if color else text


def text_lines(view: RowView, *, color: bool) -> Iterator[str]:
    """The row as running text, a part per document.

    `|` marks the start of a cycle. What is no target is in `[` `]`, or grey with `color`; a `·` is a slot of padding. After
    `→` comes the token behind the part's last slot: its target, though the row does not hold it.
    """
    yield _painted(view.title(), "title", color=color)
    for part in view.parts:
        yield _painted(part.title(), "title", color=color)
        yield "".join(_running_text(part, view.cycle_length, color=color))


def _running_text(part: Part, cycle_length: int, *, color: bool) -> Iterator[str]:
    for slot in part.slots:
        if is_cycle_head(slot.position, cycle_length):
            yield _painted("|", "head", color=color)
        if slot.is_padding:
            yield _painted(PAD_MARK, "quiet", color=color)
        else:
            yield _token(_visible(slot.text), is_target=slot.is_target, color=color)
        if slot.number == part.slots[0].number + part.piece.num_inputs - 1:
            yield _painted("→", "next", color=color) + _token(_visible(slot.label), is_target=slot.has_loss, color=color)


def _token(text: str, *, is_target: bool, color: bool) -> str:
    if is_target:
        return text
    return _painted(text, "quiet", color=True) if color else f"[{text}]"


def slot_lines(view: RowView, *, color: bool) -> Iterator[str]:
    """The row as a table, a line per slot: what the model reads there, and what it is trained to predict."""
    yield _painted(view.title(), "title", color=color)
    for part in view.parts:
        yield _painted(part.title(), "title", color=color)
        yield _painted(
            f"{'slot':>6} {'pos':>6} {'phase':>5}  {'token':>7} {'label':>7}  loss  text -> target", "quiet", color=color
        )
        for slot in part.slots:
            yield _slot_line(slot, color=color)


def _slot_line(slot: Slot, *, color: bool) -> str:
    cells = f"{slot.number:>6} {slot.position:>6} {slot.phase:>5}  {slot.token_id:>7} {slot.label_id:>7}  {int(slot.has_loss):>4}"
    text = "(padding)" if slot.is_padding else _quoted(slot.text) + (f" -> {_quoted(slot.label)}" if slot.has_loss else "")
    line = f"{'|' if slot.phase == 0 else ' '}{cells[1:]}  {text}"
    return line if slot.has_loss else _painted(line, "quiet", color=color)


def _quoted(text: str) -> str:
    return f'"{_visible(text)}"'.replace("\n", "\\n")


def to_html(views: Sequence[RowView]) -> str:
    """A page that needs nothing else. Pointing at a token shows its slot, position, ids and target."""
    body = "".join(_html_of_row(view) for view in views)
    note = (
        "An orange edge begins a cycle; grey tokens are no targets; "
        + PAD_MARK
        + " is padding; → the target of a part's last slot."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Packed rows</title><style>{_STYLE}</style></head>'
        f"<body><p>{note}</p>{body}</body></html>\n"
    )


def _html_of_row(view: RowView) -> str:
    parts = (f"<h3>{html.escape(part.title())}</h3><div>{''.join(map(_html_of, _with_end(part)))}</div>" for part in view.parts)
    return f"<h2>{html.escape(view.title())}</h2>{''.join(parts)}"


def _with_end(part: Part) -> Iterator[tuple[Slot, bool]]:
    """The slots, and whether each is the part's last one that holds a token."""
    return ((slot, slot.position == part.piece.num_inputs - 1) for slot in part.slots)


def _html_of(slot_and_end: tuple[Slot, bool]) -> str:
    slot, is_end = slot_and_end
    kinds = ["pad" if slot.is_padding else "target" if slot.is_target else "quiet"] + ["head"] * (slot.phase == 0)
    target = f", predicts {_quoted(slot.label)} ({slot.label_id})" if slot.has_loss else ", no loss"
    tip = f"slot {slot.number}, position {slot.position}, phase {slot.phase}, id {slot.token_id}{target}"
    text = PAD_MARK if slot.is_padding else html.escape(_visible(slot.text))
    end = f'<span class="next">→{html.escape(_visible(slot.label))}</span>' if is_end else ""
    return f'<span class="{" ".join(kinds)}" title="{html.escape(tip, quote=True)}">{text}</span>{end}'
