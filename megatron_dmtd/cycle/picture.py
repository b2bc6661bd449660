"""Visibility as pictures, in text and as PNG: for documentation and for looking at a mask that surprises.

Every picture is `rule.visible` asked slot by slot, so it cannot differ from what the attention kernels use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_dmtd.cycle.geometry import Slots, join, padded_document_lengths, real_slots, shadow_slots
from megatron_dmtd.cycle.rule import VANILLA, VARIANTS, is_cycle_head, visible
from megatron_dmtd.errors import CapabilityError

SEEN, UNSEEN = "#", "."

#: RGB of a key that is seen: a real slot, a shadow cycle head, a shadow MASK slot
REAL_COLOUR, HEAD_COLOUR, MASK_COLOUR = (56, 117, 179), (217, 102, 13), (250, 184, 107)


class MaskGrid(NamedTuple):
    """All slots of a row against each other; real slots, if the variant has them, come first on both axes."""

    slots: Slots
    """The rows and the columns, NumPy arrays [N] or [2N]."""
    sees: np.ndarray
    """Whether row reads column, bool [N, N] or [2N, 2N]."""
    cycle_length: int


def mask_grid(document_lengths: Sequence[int], *, variant: str, cycle_length: int) -> MaskGrid:
    """Who sees whom in a row of documents, each completed to whole cycles. Vanilla models hold real slots only."""
    lengths = padded_document_lengths(document_lengths, cycle_length)
    history, block_attention = VARIANTS.get(variant, ("real", "causal"))
    if variant == VANILLA:
        slots = real_slots(lengths)
    elif history == "real":
        slots = join(real_slots(lengths), shadow_slots(lengths))
    else:
        slots = shadow_slots(lengths)
    sees = visible(
        query_is_real=slots.is_real[:, None],
        query_document=slots.document[:, None],
        query_position=slots.position[:, None],
        key_is_real=slots.is_real[None, :],
        key_document=slots.document[None, :],
        key_position=slots.position[None, :],
        cycle_length=cycle_length,
        history=history,
        block_attention=block_attention,
    )
    return MaskGrid(slots, sees, cycle_length)


def holds_token(slots: Slots, cycle_length: int) -> np.ndarray:
    """Whether each slot's input is a real token: all of the real stream, the cycle heads of the shadow stream."""
    return slots.is_real | is_cycle_head(slots.position, cycle_length)


def history_picture(length: int, *, variant: str, cycle_length: int) -> str:
    """What the last shadow slot of a document reads, by cycle: `[1111] [1111] [1000]`.

    1 is a real token, 0 is MASK. In a vanilla model it is what the last token reads.
    """
    grid = mask_grid([length], variant=variant, cycle_length=cycle_length)
    sees, token = grid.sees[-1], holds_token(grid.slots, cycle_length)
    digits = ["1" if token[slot] else "0" for slot in np.argsort(grid.slots.position, kind="stable") if sees[slot]]
    cycles = ["".join(digits[start : start + cycle_length]) for start in range(0, len(digits), cycle_length)]
    return " ".join(f"[{cycle}]" for cycle in cycles)


def _grouped(grid: MaskGrid, cells: Sequence[str]) -> str:
    """One line of the picture: a space before each cycle, a bar before each stream."""
    line = []
    for slot, cell in enumerate(cells):
        if slot and grid.slots.is_real[slot] != grid.slots.is_real[slot - 1]:
            line.append("  |  ")
        elif slot and is_cycle_head(grid.slots.position[slot], grid.cycle_length):
            line.append(" ")
        line.append(cell)
    return "".join(line)


def _labels(grid: MaskGrid) -> list[str]:
    """A name per slot: its stream, its document's index, then `x` for a token or `M` for MASK, with the position."""
    tokens = holds_token(grid.slots, grid.cycle_length)
    return [
        f"{'real' if is_real else 'shadow':<7}{document:<4}{'x' if token else 'M'}{position}"
        for (is_real, document, position), token in zip(zip(*grid.slots), tokens)
    ]


def mask_picture(document_lengths: Sequence[int], *, variant: str, cycle_length: int) -> str:
    """The grid of who sees whom, rows reading columns: `#` sees, `.` does not.

    Columns are headed by stream, document (last digit), `x` for a token or `M` for MASK, and position (last digit). Cycles are
    set apart by a space and an empty line, streams by a bar.
    """
    grid = mask_grid(document_lengths, variant=variant, cycle_length=cycle_length)
    labels = _labels(grid)
    margin = " " * 2
    width = max(len(name) for name in [*labels, "x token, M MASK"])
    tokens = holds_token(grid.slots, cycle_length)
    heads = {
        "reads stream": ["r" if is_real else "s" for is_real in grid.slots.is_real],
        "document": [str(document)[-1] for document in grid.slots.document],
        "x token, M MASK": ["x" if token else "M" for token in tokens],
        "position": [str(position)[-1] for position in grid.slots.position],
    }
    lines = [f"{name:>{width}}{margin}{_grouped(grid, cells)}" for name, cells in heads.items()]
    for slot, label in enumerate(labels):
        if is_cycle_head(grid.slots.position[slot], cycle_length):
            lines.append("")
        cells = [SEEN if seen else UNSEEN for seen in grid.sees[slot]]
        lines.append(f"{label:<{width}}{margin}{_grouped(grid, cells)}")
    return "\n".join(lines)


def save_mask_png(path: Path, document_lengths: Sequence[int], *, variant: str, cycle_length: int) -> None:
    """Draw the same grid to the PNG file `path`. Raises `CapabilityError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError(
            found="matplotlib cannot be imported",
            required="matplotlib, to draw a PNG",
            remedy="pip install matplotlib, or leave out the PNG: the text picture shows the same grid",
        ) from error
    grid = mask_grid(document_lengths, variant=variant, cycle_length=cycle_length)
    size = len(grid.sees)
    figure = Figure(figsize=(2.2 + 0.21 * size, 1.6 + 0.21 * size), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(_colours(grid), interpolation="nearest")
    axes.set_title(f"{variant}, cycles of {cycle_length}: rows read columns", fontsize=9)
    names = [label.split()[-1] for label in _labels(grid)]
    axes.set_xticks(range(size), names, rotation=90, fontsize=7)
    axes.set_yticks(range(size), names, fontsize=7)
    for slot in range(size):
        new_stream = slot > 0 and grid.slots.is_real[slot] != grid.slots.is_real[slot - 1]
        new_document = slot > 0 and grid.slots.document[slot] != grid.slots.document[slot - 1]
        if is_cycle_head(grid.slots.position[slot], cycle_length):
            width = 1.6 if new_stream or new_document else 0.5
            axes.axhline(slot - 0.5, color="black", linewidth=width)
            axes.axvline(slot - 0.5, color="black", linewidth=width)
    axes.set_xlabel(_axis_title(grid))
    axes.set_ylabel(_axis_title(grid))
    # A half-written picture is never left under the name that was asked for.
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", metadata={"Software": None})
    os.replace(partial, path)


def _axis_title(grid: MaskGrid) -> str:
    streams = [name for name, flag in (("real stream", True), ("shadow stream", False)) if flag in grid.slots.is_real]
    return ", then ".join(streams)


def _colours(grid: MaskGrid) -> np.ndarray:
    """RGB image [rows, columns, 3], uint8: white unseen, blue a real key, orange a shadow head, light orange a MASK slot."""
    image = np.full((*grid.sees.shape, 3), 255, dtype=np.uint8)
    key_is_real, key_is_token = grid.slots.is_real[None, :], holds_token(grid.slots, grid.cycle_length)[None, :]
    image[grid.sees & key_is_real] = REAL_COLOUR
    image[grid.sees & ~key_is_real & key_is_token] = HEAD_COLOUR
    image[grid.sees & ~key_is_real & ~key_is_token] = MASK_COLOUR
    return image
