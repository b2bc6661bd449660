"""Executes plans: the passes of the schedule one after the other, each visit's weights read once per step.

It knows slots, pages and rows, but neither requests nor sampling.

Shape legend: R rows of a pass, F rows that leave it, S slots, C cycle length, X hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.inference.cache_ops.passes import PassViews
from megatron_dmtd.inference.forward import Forward
from megatron_dmtd.inference.graphs import GraphRecorder, direct
from megatron_dmtd.inference.kv.device_tables import DeviceTables
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.passes import GroupColumns, Pass
from megatron_dmtd.inference.planner import Rows, StepPlan
from megatron_dmtd.inference.static_steps import StaticSteps
from megatron_dmtd.inference.weights import ModelWeights

#: How decoding steps are executed: as they come, in shapes that repeat, or from CUDA graphs of those.
StepMode = Literal["dynamic", "static", "graphs"]


def num_scratch_pages(mode: StepMode, num_slots: int) -> int:
    """Pages that each group needs in addition to those of requests: one per slot, and one for padding rows."""
    return 0 if mode == "dynamic" else num_slots + 1


class Runner:
    """A model, its K/V store, and the pages of the requests in all slots."""

    def __init__(
        self,
        model: ModelWeights,
        store: KVStore,
        *,
        num_slots: int,
        max_length: int,
        native: bool,
        bf16_products: bool = False,
        mode: StepMode = "dynamic",
    ) -> None:
        # Blocks of the last cycle may reach past the last token.
        num_positions = max_length + model.method.cycle_length
        self.schedule, self.store = model.schedule, store
        self.forward = Forward(
            model, store, num_slots=num_slots, num_positions=num_positions, native=native, bf16_products=bf16_products
        )
        self.tables = DeviceTables(store, num_slots=num_slots, max_entries=num_positions, device=model.device)
        self._groups = {
            name: GroupColumns(groups, self.tables.by_group)
            for name in (PARALLEL, SEQUENTIAL)
            if (groups := self.schedule.pass_groups(name))
        }
        self.static: StaticSteps | None = None
        if mode != "dynamic":
            record = GraphRecorder(model.device) if mode == "graphs" else direct
            self.static = StaticSteps(self.forward, store, self.tables, num_slots=num_slots, record=record)

    def set_pages(self, slot: int, tables: PageTables) -> None:
        """Copy the numbers of a request's new pages to the device."""
        self.tables.update(slot, tables)

    @torch.inference_mode()
    def run(self, plan: StepPlan, wanted: Sequence[int]) -> torch.Tensor:
        """Execute `plan`. Returns logits `[F, V]` of the sequential rows in `wanted`, ascending."""
        if self.static is not None and self.static.takes(plan, wanted):
            return self.static.run(plan)
        outputs_FX = self._parallel_pass(plan) if len(plan.parallel) else None
        return self._sequential_pass(plan, outputs_FX, wanted)

    def _pass(self, plan: StepPlan, pass_name: str, rows: Rows, final: Sequence[int]) -> Pass:
        slots = [plan.chunks[chunk].slot for chunk in rows.chunk]
        groups, views = self._groups[pass_name], None
        if plan.views:
            views = PassViews(plan.views, plan.moves, rows=rows.view, slots=slots, groups=groups.window, device=groups.device)
        loops = [plan.chunks[chunk].num_loops for chunk in rows.chunk] if self.schedule.decoder.loop is not None else (1,)
        return Pass(rows=rows, slots=slots, final=final, groups=groups, page_size=self.store.page_size, views=views, loops=loops)

    def _parallel_pass(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states `[F, X]` of the shadow rows; each request's last block is kept."""
        outputs_FX = self.forward.parallel_outputs(self._pass(plan, PARALLEL, plan.parallel, plan.outputs))
        cycle_length = self.schedule.method.cycle_length
        for kept in plan.kept:
            self.forward.kept_SCX[kept.slot] = outputs_FX[kept.first_output : kept.first_output + cycle_length]
        return outputs_FX

    def _sequential_pass(self, plan: StepPlan, outputs_FX: torch.Tensor | None, wanted: Sequence[int]) -> torch.Tensor:
        run = self._pass(plan, SEQUENTIAL, plan.sequential, wanted)
        added_RX = self.forward.kept(run)
        if added_RX is not None and outputs_FX is not None and max(plan.from_output) >= 0:
            source_R1 = torch.tensor(plan.from_output, device=added_RX.device)[:, None]
            added_RX = torch.where(source_R1 >= 0, outputs_FX[source_R1[:, 0]], added_RX)
        return self.forward.logits(run, added_RX)
