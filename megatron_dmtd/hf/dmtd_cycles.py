"""The rule of cycles, under the name that the modeling file imports. An export carries a copy of `cycle/rule.py` here instead."""

from megatron_dmtd.cycle.rule import (
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
    "VARIANTS",
    "complete_length",
    "cycle_id",
    "cycle_start",
    "is_cycle_head",
    "parallel_entries",
    "phase",
    "shadow_ids",
    "visible",
]
