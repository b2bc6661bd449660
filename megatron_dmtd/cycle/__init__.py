"""Cycles, shadow ids and visibility: the definition of the method."""

from megatron_dmtd.cycle.rule import (
    VANILLA,
    VARIANTS,
    complete_length,
    cycle_id,
    is_cycle_head,
    phase,
    shadow_ids,
    visible,
)

__all__ = [
    "VANILLA",
    "VARIANTS",
    "complete_length",
    "cycle_id",
    "is_cycle_head",
    "phase",
    "shadow_ids",
    "visible",
]
