"""A model's forward pass over rows: the visits of one pass of the schedule, with what an earlier pass has left.

Shape legend: R rows of a pass, F rows that leave it, S slots, C cycle length, X hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_dmtd.architecture import LoopSpec
from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.loops import shared
from megatron_dmtd.inference.ops.linear import Linear
from megatron_dmtd.inference.ops.native_ops import NativeKernels, NativeOps
from megatron_dmtd.inference.ops.protocol import LayerVisit, Ops, RotaryTables, rotary_of
from megatron_dmtd.inference.ops.torch_ops import TorchOps
from megatron_dmtd.inference.passes import Pass, RowsInLayers
from megatron_dmtd.inference.weights import ModelWeights, Norm, Step


class Forward:
    """A model and its K/V store, and the hidden states kept between steps."""

    def __init__(
        self,
        model: ModelWeights,
        store: KVStore,
        *,
        num_slots: int,
        num_positions: int,
        native: bool,
        bf16_products: bool = False,
    ) -> None:
        """`native`: whether passes are computed in C, which the model has been checked for; `bf16_products` is a setting."""
        self.model = model
        rotary = rotary_of(model.schedule.decoder, num_positions, dtype=model.dtype, device=model.device)
        self.visits = {name: _visits(model, store, rotary, name) for name in (PARALLEL, SEQUENTIAL)}
        cycle_length = model.method.cycle_length
        self.native: NativeKernels | None = None
        if native:
            self.native = NativeKernels(model, max_rows=2 * cycle_length * num_slots, bf16_products=bf16_products)
        kept_size = (num_slots + 1, cycle_length, model.schedule.decoder.hidden_size)
        self.kept_SCX = torch.zeros(kept_size, dtype=model.dtype, device=model.device)
        """Outputs of the parallel pass for the current cycle of each slot; there is one more slot, for padding rows."""

    def parallel_outputs(self, run: RowsInLayers) -> torch.Tensor:
        """Hidden states `[F, X]` that leave the parallel pass."""
        return self._through(self.visits[PARALLEL], self._embedded(run), run)

    def kept(self, run: RowsInLayers) -> torch.Tensor | None:
        """Hidden states `[R, X]` that a parallel pass has left for the rows; None if the schedule has no such pass."""
        return self.kept_SCX[run.slot_R, run.phase_R] if self.model.schedule.split else None

    def logits(self, run: RowsInLayers, added_RX: torch.Tensor | None) -> torch.Tensor:
        """Logits `[F, V]` of the final rows of a sequential pass, to whose embeddings `added_RX` is added."""
        hidden_RX = self._embedded(run)
        if added_RX is not None:
            hidden_RX = hidden_RX + added_RX
        hidden_FX, ops = self._through(self.visits[SEQUENTIAL], hidden_RX, run), self.ops(run)
        return ops.head(ops.norm(hidden_FX, self.model.final_norm), self.model.head, self.model.logit_scale)

    def ops(self, run: RowsInLayers) -> Ops:
        """The arithmetic for `run`: in C if enabled, for passes that are not static."""
        if self.native is not None and isinstance(run, Pass):
            return NativeOps(self.native, run)
        return TorchOps(run)

    def _embedded(self, run: RowsInLayers) -> torch.Tensor:
        return self.model.embedding_VX[run.token_id_R].to(self.model.dtype)

    def _through(self, visits: PassVisits, hidden_RX: torch.Tensor, run: RowsInLayers) -> torch.Tensor:
        """Hidden states `[F, X]` that leave a pass."""
        ops = self.ops(run)
        hidden_RX = _layers(ops, visits.before, hidden_RX, run, is_last=not visits.loops and not visits.after)
        if visits.loops:
            hidden_RX = self._looped(visits, hidden_RX, run)
        return _layers(ops, visits.after, hidden_RX, run, is_last=True) if visits.after else hidden_RX

    def _looped(self, visits: PassVisits, before_RX: torch.Tensor, run: RowsInLayers) -> torch.Tensor:
        """Hidden states after the looped layers, which run as often as each row asks for."""
        loop = self.model.schedule.decoder.loop
        assert loop is not None, "looped visits of a decoder without a loop"
        part, _ = run.in_loop(run.num_loops)
        # Rows that end in the last loop can only be left out of it where it is the same one for all rows.
        is_last = not visits.after and part is run
        state_RX = before_RX
        for number in range(1, run.num_loops + 1):
            part, row = run.in_loop(number)
            ops, ends = self.ops(part), is_last and number == run.num_loops
            state, before = (state_RX, before_RX) if row is None else (state_RX[row], before_RX[row])
            entering = self._injected(ops, loop, state, before, is_first=number == 1)
            left = _layers(ops, visits.loop(number), entering, part, is_last=ends)
            if loop.norm is not None:
                left = ops.norm(left, Norm(None, loop.norm.eps))
            if row is None:
                state_RX = left.clone()  # what a later call of `norm` would overwrite
            else:
                state_RX = state_RX.index_copy(0, row, left)
        if not visits.after and run.ends_early and not is_last:
            return state_RX[run.final_R]
        return state_RX

    def _injected(
        self, ops: Ops, loop: LoopSpec, state_RX: torch.Tensor, before_RX: torch.Tensor, *, is_first: bool
    ) -> torch.Tensor:
        """What a loop takes in, in memory of its own."""
        if loop.injection == "concat_linear":
            assert self.model.injection is not None, loop
            return ops.linear(torch.cat([state_RX, before_RX], dim=-1), self.model.injection).clone()
        if loop.injection == "add":
            return before_RX.clone() if is_first else state_RX + before_RX
        assert loop.norm is not None and not loop.norm.has_weight, loop
        return ops.norm(state_RX + before_RX, Norm(None, loop.norm.eps)).clone()


@dataclass(frozen=True, slots=True)
class PassVisits:
    """The visits of one pass, by their place: before the looped layers, in each loop, after them."""

    before: tuple[LayerVisit, ...] = ()
    loops: tuple[tuple[LayerVisit, ...], ...] = ()
    """Of the loops of the schedule. Empty if the pass has no looped layers."""
    after: tuple[LayerVisit, ...] = ()
    shares_places: bool = False
    """Whether all loops write the same places (`last_loop`), so that there may be more of them than the schedule has."""

    def __iter__(self) -> Iterator[LayerVisit]:
        return itertools.chain(self.before, *self.loops, self.after)

    def loop(self, number: int) -> tuple[LayerVisit, ...]:
        """The visits of one loop, counted from 1."""
        return self.loops[0 if self.shares_places else number - 1]


def _visits(model: ModelWeights, store: KVStore, rotary: RotaryTables, pass_name: str) -> PassVisits:
    schedule = model.schedule
    found: dict[int | str, list[LayerVisit]] = {}
    for visit in schedule.pass_visits(pass_name):
        attention = schedule.layer(visit).attention
        bound = LayerVisit(
            weights=model.layers[visit.layer],
            attention=attention,
            rotary=rotary[attention.rotary, attention.head_dim],
            group=visit.kv_group,
            pages=store.groups[visit.kv_group].places[visit.kv_place],
        )
        loop = schedule.decoder.loop
        is_before = loop is None or visit.layer < loop.first_layer
        found.setdefault(visit.loop or ("before" if is_before else "after"), []).append(bound)
    before, after = (tuple(found.pop(name, ())) for name in ("before", "after"))
    return PassVisits(before, tuple(map(tuple, found.values())), after, shared(schedule.decoder) is not None)


def _layers(ops: Ops, visits: Sequence[LayerVisit], hidden_RX: torch.Tensor, run: RowsInLayers, *, is_last: bool) -> torch.Tensor:
    """Hidden states after some visits; `[F, X]` if they are the last ones of a pass (`is_last`). Other rows end at the last
    visit's K and V: the rest of it is dead work.
    """
    for visit in visits:
        weights, final_only = visit.weights, is_last and run.ends_early and visit is visits[-1]
        qkv = ops.linear(ops.norm(hidden_RX, weights.attention_norm), weights.qkv)
        qkv = ops.rotate_and_store(qkv, visit)
        if run.views is not None:
            run.views.copy_moved(visit, ops.move)
        if final_only:
            hidden_RX = hidden_RX[run.final_R]
            if not run.final:
                break
        attended = ops.attend(qkv, visit, final_only=final_only)
        hidden_RX = _joined(ops, attended, weights.o, hidden_RX, weights.attention_step)
        inner = ops.gate(ops.linear(ops.norm(hidden_RX, weights.mlp_norm), weights.gate_up), weights)
        hidden_RX = _joined(ops, inner, weights.down, hidden_RX, weights.mlp_step)
    return hidden_RX


def _joined(ops: Ops, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor, step: Step | None) -> torch.Tensor:
    """The residual stream after a part's last projection."""
    if step is None:
        return ops.linear_add(x, linear, residual_RX)
    return ops.linear_step(x, linear, residual_RX, step)
