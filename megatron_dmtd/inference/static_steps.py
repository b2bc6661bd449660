"""Steps in which every request takes one token, each pass in one of a few shapes, recorded when a shape first occurs.

Shape legend: F rows that leave a pass, B chunks, S slots, C cycle length, X hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.inference.forward import Forward
from megatron_dmtd.inference.graphs import Program
from megatron_dmtd.inference.kv.device_tables import DeviceTables
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.planner import Rows, StepPlan
from megatron_dmtd.inference.static_pass import StaticPass, StaticShape, num_pages_read, padded


class StaticSteps:
    """The programs met so far, one for each pass and shape."""

    def __init__(
        self, forward: Forward, store: KVStore, tables: DeviceTables, *, num_slots: int, record: Callable[[Program], Program]
    ) -> None:
        self.forward, self.store, self.tables = forward, store, tables.by_group
        self.num_slots, self.record = num_slots, record
        self.schedule = forward.model.schedule
        self.num_steps = 0
        self._programs: dict[tuple[str, StaticShape], tuple[StaticPass, Program]] = {}
        for table in self.tables.values():
            # Padding rows read a scratch page of their own, so that they stay finite.
            table.page_SP[num_slots] = store.num_pages + num_slots

    @property
    def num_programs(self) -> int:
        """Shapes met so far, of all passes."""
        return len(self._programs)

    @staticmethod
    def takes(plan: StepPlan, wanted: Sequence[int]) -> bool:
        """Whether every chunk is one token, of equally many loops, the logits of all are wanted, and no request has cache
        operations.
        """
        is_alike = len({chunk.num_loops for chunk in plan.chunks}) == 1
        return is_alike and not plan.views and len(wanted) == len(plan.chunks) == len(plan.sequential)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits `[B, V]` of the chunks' rows; each request's new block, if there is one, is kept."""
        self.num_steps += 1
        if len(plan.parallel):
            self._pass(plan, PARALLEL, plan.parallel)
        return self._pass(plan, SEQUENTIAL, plan.sequential)[: len(plan.chunks)]

    def _pass(self, plan: StepPlan, pass_name: str, rows: Rows) -> torch.Tensor:
        shape = self._shape(pass_name, rows, plan.chunks[0].num_loops)
        known = self._programs.get((pass_name, shape))
        run = known[0] if known else self._new_pass(pass_name, shape)
        run.fill(rows, [plan.chunks[chunk].slot for chunk in rows.chunk])
        if known is None:
            known = run, self.record(self._program(run, pass_name))
            self._programs[pass_name, shape] = known
        return known[1]()

    def _shape(self, pass_name: str, rows: Rows, num_loops: int) -> StaticShape:
        """A decoding step takes one slot of each stream of a sequential pass, and one cycle of each of a parallel one."""
        visits = self.schedule.pass_visits(pass_name)
        per_stream = self.schedule.method.cycle_length if pass_name == PARALLEL else 1
        return StaticShape(
            num_chunks=padded(len(set(rows.chunk)), self.num_slots),
            rows_per_chunk=per_stream * len(visits[0].streams),
            final_per_chunk=per_stream * len(visits[-1].outputs),
            num_pages=tuple(
                padded(num_pages_read(rows, group.window, self.store.page_size), self.tables[group.name].page_SP.shape[1])
                for group in self.schedule.pass_groups(pass_name)
            ),
            has_local=any(stream is not visits[0].stored for stream in visits[0].streams),
            num_loops=num_loops,
        )

    def _new_pass(self, pass_name: str, shape: StaticShape) -> StaticPass:
        groups = self.schedule.pass_groups(pass_name)
        scratch, page_size = self.store.num_pages, self.store.page_size
        return StaticPass(shape, groups, self.tables, first_scratch_page=scratch, page_size=page_size)

    def _program(self, run: StaticPass, pass_name: str) -> Program:
        def parallel() -> torch.Tensor:
            run.begin()
            outputs_FX = self.forward.parallel_outputs(run)
            self.forward.kept_SCX[run.slot_B] = outputs_FX.unflatten(0, (run.shape.num_chunks, -1))
            return outputs_FX

        def sequential() -> torch.Tensor:
            run.begin()
            return self.forward.logits(run, self.forward.kept(run))

        return parallel if pass_name == PARALLEL else sequential
