"""Cycles, shadow ids and visibility: the definition of the method.

`cycle.mask`, which needs torch, is imported by its own name.
"""

from megatron_dmtd.cycle.geometry import (
    Slots,
    documents,
    join,
    padded_document_lengths,
    positions,
    real_slots,
    require_whole_cycles,
    shadow_slots,
)
from megatron_dmtd.cycle.method import ORDINARY, Method
from megatron_dmtd.cycle.picture import decoding_grid, decoding_picture, history_picture, mask_grid, mask_picture, save_mask_png
from megatron_dmtd.cycle.rule import (
    VANILLA,
    VARIANTS,
    complete_length,
    cycle_id,
    cycle_start,
    is_cycle_head,
    parallel_entries,
    phase,
    shadow_ids,
    visible,
)

__all__ = [
    "ORDINARY",
    "VANILLA",
    "VARIANTS",
    "Method",
    "Slots",
    "complete_length",
    "cycle_id",
    "cycle_start",
    "decoding_grid",
    "decoding_picture",
    "documents",
    "history_picture",
    "is_cycle_head",
    "join",
    "mask_grid",
    "mask_picture",
    "padded_document_lengths",
    "parallel_entries",
    "phase",
    "positions",
    "real_slots",
    "require_whole_cycles",
    "save_mask_png",
    "shadow_ids",
    "shadow_slots",
    "visible",
]
