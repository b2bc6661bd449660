"""Executes plans: the parallel half, then the sequential half, each layer's weights read once per step.

It knows slots, pages and rows; requests, sampling and time are the engine's.

Shape legend: R rows, F rows that leave a half, S slots, C cycle length, X hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dmtd.cycle import phase
from megatron_dmtd.inference.matmul import ROW_COUNTS, FastestMatmul
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.native_ops import NativeOps
from megatron_dmtd.inference.passes import BlockTables, Pass
from megatron_dmtd.inference.planner import Rows, StepPlan
from megatron_dmtd.inference.pools import KeyValuePool, Pools, Tables
from megatron_dmtd.inference.torch_ops import TorchOps
from megatron_dmtd.inference.weights import ModelWeights


class Runner:
    """A model, its pools, and the hidden states kept between steps."""

    def __init__(self, model: ModelWeights, pools: Pools, *, num_slots: int, max_length: int, native: bool) -> None:
        shape, device = model.shape, model.device
        self.model, self.pools = model, pools
        cos_TE, sin_TE = model.rotary_tables(max_length + model.method.cycle_length)
        self.torch_ops = TorchOps(shape, cos_TE, sin_TE)
        self.native_ops: NativeOps | None = None
        if native:
            max_rows = min(ROW_COUNTS[-1], 2 * model.method.cycle_length * num_slots)
            measured_on = [matrix for layer in model.layers[:2] for matrix in layer.matrices]
            fastest = FastestMatmul(load_kernels(), measured_on, max_rows=max_rows)
            self.native_ops = NativeOps(model, cos_TE, sin_TE, fastest, max_rows=max_rows)
        kept_size = (num_slots, model.method.cycle_length, shape.hidden_size)
        self.kept_SCX = torch.zeros(kept_size, dtype=model.dtype, device=device)
        self.tables = {
            id(pool): BlockTables(num_slots, pool.pages.pages_for(max_length + model.method.cycle_length), device)
            for pool in (pools.parallel, pools.sequential)
        }

    def set_pages(self, slot: int, tables: Tables) -> None:
        """Tell the device of pages that a request has got."""
        self.tables[id(self.pools.parallel)].update(slot, tables.parallel)
        self.tables[id(self.pools.sequential)].update(slot, tables.sequential)

    @torch.inference_mode()
    def run(self, plan: StepPlan, wanted: Sequence[int]) -> torch.Tensor:
        """Execute `plan`. Returns logits `[F, V]` of the sequential rows in `wanted`, ascending."""
        outputs_FX = self._parallel_half(plan) if len(plan.parallel) else None
        return self._sequential_half(plan, outputs_FX, wanted)

    def _pass(self, plan: StepPlan, rows: Rows, final: Sequence[int], pool: KeyValuePool) -> Pass:
        slots = [plan.chunks[chunk].slot for chunk in rows.chunk]
        return Pass(rows=rows, slots=slots, final=final, tables=self.tables[id(pool)], page_size=pool.shape.page_size)

    def _parallel_half(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states `[F, X]` of the shadow rows; each request's last block is kept."""
        run = self._pass(plan, plan.parallel, plan.outputs, self.pools.parallel)
        hidden_RX = self.model.embedding_VX[run.token_id_R].to(self.model.dtype)
        outputs_FX = self._layers(range(self.model.shape.num_parallel_layers), hidden_RX, run, self.pools.parallel)
        cycle_length = self.model.method.cycle_length
        for kept in plan.kept:
            self.kept_SCX[kept.slot] = outputs_FX[kept.first_output : kept.first_output + cycle_length]
        return outputs_FX

    def _sequential_half(self, plan: StepPlan, outputs_FX: torch.Tensor | None, wanted: Sequence[int]) -> torch.Tensor:
        run = self._pass(plan, plan.sequential, wanted, self.pools.sequential)
        model = self.model
        hidden_RX = model.embedding_VX[run.token_id_R].to(model.dtype)
        if not model.method.is_vanilla:
            added_RX = self.kept_SCX[run.slot_R, phase(run.position_R, model.method.cycle_length)]
            if outputs_FX is not None and max(plan.from_output) >= 0:
                source_R1 = torch.tensor(plan.from_output, device=hidden_RX.device)[:, None]
                added_RX = torch.where(source_R1 >= 0, outputs_FX[source_R1[:, 0]], added_RX)
            hidden_RX = hidden_RX + added_RX
        layers = range(model.shape.num_parallel_layers, model.shape.num_layers)
        hidden_FX = self._layers(layers, hidden_RX, run, self.pools.sequential)
        ops = self._ops(run)
        return ops.linear(ops.norm(hidden_FX, model.final_norm_X), model.head_VX)

    def _ops(self, run: Pass) -> TorchOps | NativeOps:
        return self.native_ops if self.native_ops is not None and self.native_ops.takes(run) else self.torch_ops

    def _layers(self, layers: range, hidden_RX: torch.Tensor, run: Pass, pool: KeyValuePool) -> torch.Tensor:
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
