"""Executes plans: the parallel half, then the sequential half, each layer's weights read once per step.

It knows slots, pages and rows; requests, sampling and time are the engine's.

Shape legend: R rows, F rows that leave a half, S slots, C cycle length, B chunks, X hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from megatron_dmtd.cycle import phase
from megatron_dmtd.inference.graphs import GraphRecorder, Program, direct
from megatron_dmtd.inference.kv.store import KeyValuePool, Pools, Tables
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.matmul import ROW_COUNTS, FastestMatmul
from megatron_dmtd.inference.ops.native_ops import NativeOps
from megatron_dmtd.inference.ops.torch_ops import TorchOps
from megatron_dmtd.inference.passes import BlockTables, Pass
from megatron_dmtd.inference.planner import Rows, StepPlan
from megatron_dmtd.inference.static_pass import StaticPass, StaticShape, padded
from megatron_dmtd.inference.weights import ModelWeights

#: How decoding steps are executed: as they come, in shapes that repeat, or from CUDA graphs of those.
StepMode = Literal["dynamic", "static", "graphs"]


def num_scratch_pages(mode: StepMode, num_slots: int) -> int:
    """Pages that each pool needs besides those of requests: one per slot, and one for rows that are nobody's."""
    return 0 if mode == "dynamic" else num_slots + 1


class Runner:
    """A model, its pools, and the hidden states kept between steps."""

    def __init__(
        self, model: ModelWeights, pools: Pools, *, num_slots: int, max_length: int, native: bool, mode: StepMode = "dynamic"
    ) -> None:
        shape, device = model.shape, model.device
        self.model, self.pools, self.num_slots = model, pools, num_slots
        cos_TE, sin_TE = model.rotary_tables(max_length + model.method.cycle_length)
        self.torch_ops = TorchOps(shape, cos_TE, sin_TE)
        self.native_ops: NativeOps | None = None
        if native:
            max_rows = min(ROW_COUNTS[-1], 2 * model.method.cycle_length * num_slots)
            measured_on = [matrix for layer in model.layers[:2] for matrix in layer.matrices]
            fastest = FastestMatmul(load_kernels(), measured_on, max_rows=max_rows)
            self.native_ops = NativeOps(model, cos_TE, sin_TE, fastest, max_rows=max_rows)
        kept_size = (num_slots + 1, model.method.cycle_length, shape.hidden_size)
        self.kept_SCX = torch.zeros(kept_size, dtype=model.dtype, device=device)
        self.tables = {
            id(pool): BlockTables(num_slots + 1, pool.pages.pages_for(max_length + model.method.cycle_length), device)
            for pool in (pools.parallel, pools.sequential)
        }
        self.static: StaticHalves | None = None
        if mode != "dynamic":
            self.static = StaticHalves(self, GraphRecorder(device) if mode == "graphs" else direct)

    def set_pages(self, slot: int, tables: Tables) -> None:
        """Tell the device of pages that a request has got."""
        self.tables[id(self.pools.parallel)].update(slot, tables.parallel)
        self.tables[id(self.pools.sequential)].update(slot, tables.sequential)

    @torch.inference_mode()
    def run(self, plan: StepPlan, wanted: Sequence[int]) -> torch.Tensor:
        """Execute `plan`. Returns logits `[F, V]` of the sequential rows in `wanted`, ascending."""
        if self.static is not None and self.static.takes(plan, wanted):
            return self.static.run(plan)
        outputs_FX = self._parallel_half(plan) if len(plan.parallel) else None
        return self._sequential_half(plan, outputs_FX, wanted)

    def _pass(self, plan: StepPlan, rows: Rows, final: Sequence[int], pool: KeyValuePool) -> Pass:
        slots = [plan.chunks[chunk].slot for chunk in rows.chunk]
        return Pass(rows=rows, slots=slots, final=final, tables=self.tables[id(pool)], page_size=pool.shape.page_size)

    def _parallel_half(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states `[F, X]` of the shadow rows; each request's last block is kept."""
        run = self._pass(plan, plan.parallel, plan.outputs, self.pools.parallel)
        outputs_FX = self.parallel_outputs(run)
        cycle_length = self.model.method.cycle_length
        for kept in plan.kept:
            self.kept_SCX[kept.slot] = outputs_FX[kept.first_output : kept.first_output + cycle_length]
        return outputs_FX

    def _sequential_half(self, plan: StepPlan, outputs_FX: torch.Tensor | None, wanted: Sequence[int]) -> torch.Tensor:
        run = self._pass(plan, plan.sequential, wanted, self.pools.sequential)
        if self.model.method.is_vanilla:
            return self.logits(run, None)
        added_RX = self.kept(run)
        if outputs_FX is not None and max(plan.from_output) >= 0:
            source_R1 = torch.tensor(plan.from_output, device=added_RX.device)[:, None]
            added_RX = torch.where(source_R1 >= 0, outputs_FX[source_R1[:, 0]], added_RX)
        return self.logits(run, added_RX)

    # Halves of passes of either kind.

    def parallel_outputs(self, run: Pass | StaticPass) -> torch.Tensor:
        """Hidden states `[F, X]` that leave the last parallel layer."""
        return self._layers(range(self.model.shape.num_parallel_layers), self._embedded(run), run, self.pools.parallel)

    def kept(self, run: Pass | StaticPass) -> torch.Tensor:
        """Hidden states `[R, X]` kept for the rows."""
        return self.kept_SCX[run.slot_R, phase(run.position_R, self.model.method.cycle_length)]

    def logits(self, run: Pass | StaticPass, added_RX: torch.Tensor | None) -> torch.Tensor:
        """Logits `[F, V]` of the final rows, whose embeddings have something added to them unless the model is vanilla."""
        model, hidden_RX = self.model, self._embedded(run)
        if added_RX is not None:
            hidden_RX = hidden_RX + added_RX
        layers = range(model.shape.num_parallel_layers, model.shape.num_layers)
        hidden_FX = self._layers(layers, hidden_RX, run, self.pools.sequential)
        ops = self._ops(run)
        return ops.linear(ops.norm(hidden_FX, model.final_norm_X), model.head_VX)

    def _embedded(self, run: Pass | StaticPass) -> torch.Tensor:
        return self.model.embedding_VX[run.token_id_R].to(self.model.dtype)

    def _ops(self, run: Pass | StaticPass) -> Any:
        """The arithmetic for `run`: `TorchOps`, or `NativeOps`, which take no static pass."""
        if self.native_ops is not None and isinstance(run, Pass) and self.native_ops.takes(run):
            return self.native_ops
        return self.torch_ops

    def _layers(self, layers: range, hidden_RX: torch.Tensor, run: Pass | StaticPass, pool: KeyValuePool) -> torch.Tensor:
        """The layers of one half. Rows that are not final end at the last layer's K and V: the rest of it is dead work."""
        ops = self._ops(run)
        for pool_layer, layer in enumerate(layers):
            weights, final_only = self.model.layers[layer], run.ends_early and layer == layers[-1]
            qkv = ops.linear(ops.norm(hidden_RX, weights.input_norm_X), weights.qkv, weights.qkv_bias)
            qkv = ops.rotate_and_store(qkv, weights, run, pool, pool_layer)
            if final_only:
                hidden_RX = hidden_RX[run.final_F]
                if not len(run.final):
                    break
            attended = ops.attend(qkv, run, pool, pool_layer, final_only=final_only)
            hidden_RX = ops.linear_add(attended, weights.o, weights.o_bias, hidden_RX)
            inner = ops.gate(ops.linear(ops.norm(hidden_RX, weights.post_norm_X), weights.gate_up))
            hidden_RX = ops.linear_add(inner, weights.down, None, hidden_RX)
        return hidden_RX


class StaticHalves:
    """Steps in which every request takes one token, each half in one of a few shapes, recorded when a shape first occurs."""

    def __init__(self, runner: Runner, record: Callable[[Program], Program]) -> None:
        self.runner, self.record = runner, record
        self.num_steps = 0
        self._programs: dict[tuple[bool, StaticShape], tuple[StaticPass, Program]] = {}
        for pool in (runner.pools.parallel, runner.pools.sequential):
            # Rows that are nobody's read their own scratch page, so that they stay finite.
            runner.tables[id(pool)].page_SP[runner.num_slots] = pool.shape.num_pages + runner.num_slots

    @property
    def num_programs(self) -> int:
        """Shapes met so far, of both halves."""
        return len(self._programs)

    @staticmethod
    def takes(plan: StepPlan, wanted: Sequence[int]) -> bool:
        """Whether every chunk is one token, and the logits of all are wanted."""
        return len(wanted) == len(plan.chunks) == len(plan.sequential)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits `[B, V]` of the chunks' rows; each request's new block, if there is one, is kept."""
        self.num_steps += 1
        method = self.runner.model.method
        if len(plan.parallel):
            rows_per_chunk = (2 if method.refreshes else 1) * method.cycle_length
            self._half(plan, plan.parallel, True, rows_per_chunk, method.cycle_length, has_local=method.refreshes)
        return self._half(plan, plan.sequential, False, 1, 1, has_local=False)[: len(plan.chunks)]

    def _half(
        self, plan: StepPlan, rows: Rows, is_parallel: bool, rows_per_chunk: int, final_per_chunk: int, *, has_local: bool
    ) -> torch.Tensor:
        pools = self.runner.pools
        pool = pools.parallel if is_parallel else pools.sequential
        tables = self.runner.tables[id(pool)]
        num_pages = max(1, pool.pages.pages_for(max(rows.history_length)))
        shape = StaticShape(
            num_chunks=padded(len(set(rows.chunk)), self.runner.num_slots),
            rows_per_chunk=rows_per_chunk,
            final_per_chunk=final_per_chunk,
            num_pages=padded(num_pages, tables.page_SP.shape[1]),
            has_local=has_local,
        )
        known = self._programs.get((is_parallel, shape))
        run = known[0] if known else self._new_pass(shape, pool)
        run.fill(rows, [plan.chunks[chunk].slot for chunk in rows.chunk])
        if known is None:
            known = run, self.record(self._program(run, is_parallel))
            self._programs[is_parallel, shape] = known
        return known[1]()

    def _new_pass(self, shape: StaticShape, pool: KeyValuePool) -> StaticPass:
        tables, page_size = self.runner.tables[id(pool)], pool.shape.page_size
        return StaticPass(shape, tables, first_scratch_page=pool.shape.num_pages, page_size=page_size)

    def _program(self, run: StaticPass, is_parallel: bool) -> Program:
        def parallel() -> torch.Tensor:
            run.begin()
            outputs_FX = self.runner.parallel_outputs(run)
            self.runner.kept_SCX[run.slot_B] = outputs_FX.unflatten(0, (run.shape.num_chunks, -1))
            return outputs_FX

        def sequential() -> torch.Tensor:
            run.begin()
            return self.runner.logits(run, None if self.runner.model.method.is_vanilla else self.runner.kept(run))

        return parallel if is_parallel else sequential
