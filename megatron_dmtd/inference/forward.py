"""A model's forward pass over rows: the visits of one pass of the schedule, with what an earlier pass has left.

Shape legend: R rows of a pass, F rows that leave it, S slots, C cycle length, X hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.ops.native_ops import NativeKernels, NativeOps
from megatron_dmtd.inference.ops.protocol import LayerVisit, Ops, RotaryTables, rotary_of
from megatron_dmtd.inference.ops.torch_ops import TorchOps
from megatron_dmtd.inference.passes import Pass, RowsInLayers
from megatron_dmtd.inference.weights import ModelWeights


class Forward:
    """A model and its K/V store, and the hidden states kept between steps."""

    def __init__(self, model: ModelWeights, store: KVStore, *, num_slots: int, num_positions: int, native: bool) -> None:
        """`native`: whether passes are computed in C, which the model has been checked for."""
        self.model = model
        rotary = rotary_of(model.schedule.decoder, num_positions, dtype=model.dtype, device=model.device)
        self.visits = {name: _visits(model, store, rotary, name) for name in (PARALLEL, SEQUENTIAL)}
        cycle_length = model.method.cycle_length
        self.native: NativeKernels | None = None
        if native:
            self.native = NativeKernels(model, max_rows=2 * cycle_length * num_slots)
        kept_size = (num_slots + 1, cycle_length, model.schedule.decoder.hidden_size)
        self.kept_SCX = torch.zeros(kept_size, dtype=model.dtype, device=model.device)
        """Outputs of the parallel pass for the current cycle of each slot; there is one more slot, for padding rows."""

    def parallel_outputs(self, run: RowsInLayers) -> torch.Tensor:
        """Hidden states `[F, X]` that leave the parallel pass."""
        return _through(self.ops(run), self.visits[PARALLEL], self._embedded(run), run)

    def kept(self, run: RowsInLayers) -> torch.Tensor | None:
        """Hidden states `[R, X]` that a parallel pass has left for the rows; None if the schedule has no such pass."""
        return self.kept_SCX[run.slot_R, run.phase_R] if self.visits[PARALLEL] else None

    def logits(self, run: RowsInLayers, added_RX: torch.Tensor | None) -> torch.Tensor:
        """Logits `[F, V]` of the final rows of a sequential pass, to whose embeddings `added_RX` is added."""
        ops, hidden_RX = self.ops(run), self._embedded(run)
        if added_RX is not None:
            hidden_RX = hidden_RX + added_RX
        hidden_FX = _through(ops, self.visits[SEQUENTIAL], hidden_RX, run)
        return ops.head(ops.norm(hidden_FX, self.model.final_norm), self.model.head)

    def ops(self, run: RowsInLayers) -> Ops:
        """The arithmetic for `run`: in C if enabled, for passes that are neither static nor of requests with cache operations."""
        if self.native is not None and isinstance(run, Pass) and run.views is None:
            return NativeOps(self.native, run)
        return TorchOps(run)

    def _embedded(self, run: RowsInLayers) -> torch.Tensor:
        return self.model.embedding_VX[run.token_id_R].to(self.model.dtype)


def _visits(model: ModelWeights, store: KVStore, rotary: RotaryTables, pass_name: str) -> tuple[LayerVisit, ...]:
    schedule, found = model.schedule, []
    for visit in schedule.pass_visits(pass_name):
        attention = schedule.layer(visit).attention
        found.append(
            LayerVisit(
                weights=model.layers[visit.layer],
                attention=attention,
                rotary=rotary[attention.rotary, attention.head_dim],
                group=visit.kv_group,
                pages=store.groups[visit.kv_group].places[visit.kv_place],
            )
        )
    return tuple(found)


def _through(ops: Ops, visits: Sequence[LayerVisit], hidden_RX: torch.Tensor, run: RowsInLayers) -> torch.Tensor:
    """Hidden states `[F, X]` that leave a pass. Other rows end at the last visit's K and V: the rest of it is dead work."""
    for visit in visits:
        weights, final_only = visit.weights, run.ends_early and visit is visits[-1]
        qkv = ops.linear(ops.norm(hidden_RX, weights.attention_norm), weights.qkv)
        qkv = ops.rotate_and_store(qkv, visit)
        if run.views is not None:
            run.views.copy_moved(visit)
        if final_only:
            hidden_RX = hidden_RX[run.final_R]
            if not run.final:
                break
        attended = ops.attend(qkv, visit, final_only=final_only)
        hidden_RX = ops.linear_add(attended, weights.o, hidden_RX)
        inner = ops.gate(ops.linear(ops.norm(hidden_RX, weights.mlp_norm), weights.gate_up))
        hidden_RX = ops.linear_add(inner, weights.down, hidden_RX)
    return hidden_RX
