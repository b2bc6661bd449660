"""Visibility as pictures, in text and as PNG: for the documentation, and for inspecting a surprising mask.

Every picture evaluates `rule.visible` slot by slot, so it cannot differ from what the attention kernels use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_dmtd.cycle.geometry import Slots, join, padded_document_lengths, real_slots, shadow_slots
from megatron_dmtd.cycle.method import ORDINARY, Method
from megatron_dmtd.cycle.rule import VARIANTS, cycle_id, is_cycle_head, visible
from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.infra.files import replacing

SEEN, UNSEEN = "#", "."

#: RGB of a key that is seen: a real slot, a shadow cycle head, a shadow MASK slot; and of one that is not
REAL_COLOUR, HEAD_COLOUR, MASK_COLOUR, UNSEEN_COLOUR = (56, 117, 179), (217, 102, 13), (250, 184, 107), (255, 255, 255)
#: what each colour means
LEGEND = {
    REAL_COLOUR: "reads a token of the real stream",
    HEAD_COLOUR: "reads a cycle head of the shadow stream",
    MASK_COLOUR: "reads MASK in the shadow stream",
    UNSEEN_COLOUR: "does not read it",
}


class MaskGrid(NamedTuple):
    """Query slots against key slots; real slots, if there are any, come first on both axes."""

    queries: Slots
    """The rows, NumPy arrays [Q]."""
    keys: Slots
    """The columns, NumPy arrays [K]."""
    sees: np.ndarray
    """Whether row reads column, bool [Q, K]."""
    cycle_length: int


#: the slots of each stream
_SLOTS = {"real": real_slots, "shadow": shadow_slots}


def _pictured(variant: str, cycle_length: int) -> Method:
    """The method whose first layer is drawn. An ordinary decoder is drawn in cycles too, although it has none."""
    return Method(variant=variant, cycle_length=cycle_length, num_parallel_layers=1) if variant in VARIANTS else ORDINARY


def mask_grid(document_lengths: Sequence[int], *, variant: str, cycle_length: int, window: int | None = None) -> MaskGrid:
    """All slots of a row of documents, each completed to whole cycles, against one another. Vanilla: real slots only.

    `window`: keys that a query sees at most, itself included: a sliding window; None: no limit.
    """
    lengths = padded_document_lengths(document_lengths, cycle_length)
    method = _pictured(variant, cycle_length)
    slots = join(*(_SLOTS[stream](lengths) for stream in method.streams))
    sees = visible(
        query_is_real=slots.is_real[:, None],
        query_document=slots.document[:, None],
        query_position=slots.position[:, None],
        key_is_real=slots.is_real[None, :],
        key_document=slots.document[None, :],
        key_position=slots.position[None, :],
        cycle_length=cycle_length,
        history=method.history,
        block_attention=method.block_attention,
        window=window,
    )
    return MaskGrid(slots, slots, sees, cycle_length)


def decoding_grid(cycle: int, *, variant: str, cycle_length: int, window: int | None = None) -> MaskGrid:
    """The forward pass of the parallel layers that begins `cycle` in decoding (docs/method.md, sections 7.3 and 8.2).

    Rows are the slots that it computes: the shadow block, preceded by the real tokens of the previous cycle if the variant
    refreshes. Columns are the cache and those slots. The grid is a part of the training grid, which is why the two agree.
    """
    assert variant in VARIANTS and cycle >= 0, (variant, cycle)
    full = mask_grid([(cycle + 1) * cycle_length], variant=variant, cycle_length=cycle_length, window=window)
    slot_cycle, is_real = cycle_id(full.queries.position, cycle_length), full.queries.is_real
    rows = np.where(is_real, slot_cycle == cycle - 1, slot_cycle == cycle)
    columns = full.sees[rows].any(axis=0)
    queries, keys = (Slots(*(part[chosen] for part in full.queries)) for chosen in (rows, columns))
    return MaskGrid(queries, keys, full.sees[rows][:, columns], cycle_length)


def holds_token(slots: Slots, cycle_length: int) -> np.ndarray:
    """Whether each slot's input is a real token: true in the real stream, and at the cycle heads of the shadow stream."""
    return slots.is_real | is_cycle_head(slots.position, cycle_length)


def history_picture(length: int, *, variant: str, cycle_length: int, window: int | None = None) -> str:
    """What the last shadow slot of a document reads, by cycle: `[1111] [1111] [1000]`.

    1 is a real token, 0 is MASK. For a vanilla model: what the last token reads.
    """
    grid = mask_grid([length], variant=variant, cycle_length=cycle_length, window=window)
    sees, token = grid.sees[-1], holds_token(grid.keys, cycle_length)
    cycles: dict[int, str] = {}
    for key in np.argsort(grid.keys.position, kind="stable"):
        if sees[key]:
            cycle = cycle_id(int(grid.keys.position[key]), cycle_length)
            cycles[cycle] = cycles.get(cycle, "") + ("1" if token[key] else "0")
    return " ".join(f"[{digits}]" for digits in cycles.values())


def _starts_stream(slots: Slots, slot: int) -> bool:
    """Whether a stream other than the first begins at `slot`."""
    return slot > 0 and slots.is_real[slot] != slots.is_real[slot - 1]


def _starts_document(slots: Slots, slot: int) -> bool:
    """Whether a document other than the first of a stream begins at `slot`."""
    return slot > 0 and slots.document[slot] != slots.document[slot - 1]


def _grouped(grid: MaskGrid, cells: Sequence[str]) -> str:
    """One line of the picture: a space before each cycle, a bar before each stream."""
    line = []
    for key, cell in enumerate(cells):
        if _starts_stream(grid.keys, key):
            line.append("  |  ")
        elif key and is_cycle_head(grid.keys.position[key], grid.cycle_length):
            line.append(" ")
        line.append(cell)
    return "".join(line)


def _names(slots: Slots, cycle_length: int) -> list[str]:
    """`x` for a token or `M` for MASK, with the position."""
    return [f"{'x' if token else 'M'}{place}" for token, place in zip(holds_token(slots, cycle_length), slots.position)]


def grid_text(grid: MaskGrid) -> str:
    """The grid as text; rows read columns: `#` is visible, `.` is not.

    The header gives each column's stream, document (last digit), `x` for a token or `M` for MASK, and position (last digit). Rows
    are labelled likewise. A space or an empty line separates cycles, a bar separates streams.
    """
    keys = grid.keys
    heads = {
        "reads stream": ["r" if is_real else "s" for is_real in keys.is_real],
        "document": [str(document)[-1] for document in keys.document],
        "x token, M MASK": [name[0] for name in _names(keys, grid.cycle_length)],
        "position": [name[-1] for name in _names(keys, grid.cycle_length)],
    }
    labels = [
        f"{'real' if is_real else 'shadow':<7}{document:<4}{name}"
        for is_real, document, name in zip(grid.queries.is_real, grid.queries.document, _names(grid.queries, grid.cycle_length))
    ]
    width = max(len(name) for name in [*labels, *heads])
    lines = [f"{name:>{width}}  {_grouped(grid, cells)}" for name, cells in heads.items()]
    for query, label in enumerate(labels):
        if is_cycle_head(grid.queries.position[query], grid.cycle_length):
            lines.append("")
        cells = [SEEN if seen else UNSEEN for seen in grid.sees[query]]
        lines.append(f"{label:<{width}}  {_grouped(grid, cells)}")
    return "\n".join(lines)


def mask_picture(document_lengths: Sequence[int], *, variant: str, cycle_length: int, window: int | None = None) -> str:
    """`grid_text` of a whole row of documents, as training sees it."""
    return grid_text(mask_grid(document_lengths, variant=variant, cycle_length=cycle_length, window=window))


def decoding_picture(cycle: int, *, variant: str, cycle_length: int, window: int | None = None) -> str:
    """`grid_text` of the forward pass that begins `cycle` in decoding."""
    return grid_text(decoding_grid(cycle, variant=variant, cycle_length=cycle_length, window=window))


def save_mask_png(
    path: Path, document_lengths: Sequence[int], *, variant: str, cycle_length: int, window: int | None = None
) -> None:
    """Draw the same grid to the PNG file `path`. Raises `CapabilityError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise CapabilityError(
            found="matplotlib cannot be imported",
            required="matplotlib, to draw a PNG",
            remedy="pip install matplotlib, or leave out the PNG: the text picture shows the same grid",
        ) from error
    grid = mask_grid(document_lengths, variant=variant, cycle_length=cycle_length, window=window)
    slots, size = grid.keys, len(grid.sees)
    figure = Figure(figsize=(max(2.2 + 0.21 * size, 4), 2.4 + 0.21 * size), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    image = colours(grid)
    axes.imshow(image, interpolation="nearest")
    limit = "" if window is None else f", window of {window}"
    axes.set_title(f"{variant}, cycles of {cycle_length}{limit}: rows read columns", fontsize=9)
    axes.set_xticks(range(size), _names(slots, cycle_length), rotation=90, fontsize=7)
    axes.set_yticks(range(size), _names(slots, cycle_length), fontsize=7)
    axes.set_xlabel(_axis_title(slots))
    axes.set_ylabel(_axis_title(slots))
    for slot in range(size):
        if is_cycle_head(slots.position[slot], cycle_length):
            width = 1.6 if _starts_stream(slots, slot) or _starts_document(slots, slot) else 0.5
            axes.axhline(slot - 0.5, color="black", linewidth=width)
            axes.axvline(slot - 0.5, color="black", linewidth=width)
    patches = [
        Patch(facecolor="#" + bytes(colour).hex(), edgecolor="black", linewidth=0.5, label=meaning)
        for colour, meaning in legend(image).items()
    ]
    figure.legend(handles=patches, loc="outside lower center", fontsize=7)
    # A partly written picture never appears under the requested name.
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def legend(image: np.ndarray) -> dict[tuple[int, ...], str]:
    """What the colours of an image [rows, columns, 3] mean."""
    shown = {tuple(colour) for colour in image.reshape(-1, 3).tolist()}
    return {colour: meaning for colour, meaning in LEGEND.items() if colour in shown}


def _axis_title(slots: Slots) -> str:
    streams = [name for name, flag in (("real stream", True), ("shadow stream", False)) if flag in slots.is_real]
    return ", then ".join(streams)


def colours(grid: MaskGrid) -> np.ndarray:
    """RGB image [rows, columns, 3], uint8: white unseen, blue a real key, orange a shadow head, light orange a MASK slot."""
    image = np.full((*grid.sees.shape, 3), UNSEEN_COLOUR, dtype=np.uint8)
    key_is_real, key_is_token = grid.keys.is_real[None, :], holds_token(grid.keys, grid.cycle_length)[None, :]
    image[grid.sees & key_is_real] = REAL_COLOUR
    image[grid.sees & ~key_is_real & key_is_token] = HEAD_COLOUR
    image[grid.sees & ~key_is_real & ~key_is_token] = MASK_COLOUR
    return image
