"""The stack of layers of one pipeline stage, which runs the stage's visits in order.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.utils import make_viewless_tensor

from megatron_dmtd.architecture import LoopSpec, Schedule, Visit, make_schedule
from megatron_dmtd.architecture.schedule import SEQUENTIAL
from megatron_dmtd.models.layers import layer_spec
from megatron_dmtd.models.norm import norm_spec
from megatron_dmtd.models.residual import ConcatLinear, LoopEntry, inject
from megatron_dmtd.models.streams import MicrobatchStreams
from megatron_dmtd.parallel.placement import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Loops:
    """How often the looped layers run in the microbatches of a step."""

    num_loops: int
    """At least 1."""
    num_with_gradient: int = 0
    """The last runs, through which gradients flow; those before are computed without. 0: all."""

    def has_gradient(self, visit: Visit) -> bool:
        """Whether gradients flow through a visit."""
        return not visit.loop or not self.num_with_gradient or visit.loop > self.num_loops - self.num_with_gradient


class CycleBlock(TransformerBlock):
    """Megatron's TransformerBlock, visiting its layers in the order of a schedule."""

    def __init__(self, config: Any, *, schedule: Schedule, stage: Stage, pg_collection: Any) -> None:
        self.stage = stage
        self.schedule = schedule
        decoder = schedule.decoder
        super().__init__(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[layer_spec(decoder.layers[layer], config) for layer in stage.layers],
                layer_norm=norm_spec(decoder.final_norm),
            ),
            pre_process=stage.has_input_embedding,
            post_process=stage.has_output,
            pg_collection=pg_collection,
            vp_stage=stage.virtual if config.virtual_pipeline_model_parallel_size else None,
        )
        numbers = tuple(layer.layer_number - 1 for layer in self.layers)
        assert numbers == stage.layers, f"Megatron numbers the layers {numbers}"
        self._build_loop(decoder.loop if any(visit.loop for visit in stage.visits) else None)

    def _build_loop(self, loop: LoopSpec | None) -> None:
        self.loop_entry = None
        self.loops = Loops(num_loops=1)
        if loop is not None:
            self.injection = ConcatLinear(self.config) if loop.injection == "concat_linear" else None
            self.loop_entry = LoopEntry(loop, self.injection)
            self.loops = Loops(num_loops=loop.num_loops)
        self._visits = {self.loops.num_loops: self.stage.visits}

    def visits(self) -> tuple[Visit, ...]:
        """The stage's visits, with as many loops as `loops` says. Set that between steps: recompute runs them again."""
        num_loops = self.loops.num_loops
        if num_loops not in self._visits:
            schedule = make_schedule(self.schedule.decoder, self.schedule.method, num_loops=num_loops)
            self._visits[num_loops] = tuple(visit for visit in schedule.visits if visit.layer in self.stage.layers)
        return self._visits[num_loops]

    def forward(
        self,
        hidden_sbh: torch.Tensor | None,
        *,
        streams: MicrobatchStreams,
        token_embedding_sbh: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run this stage.

        `hidden_sbh`: the streams that enter the first visit, on the first stage; later stages take what the pipeline schedule
        passed to `set_input_tensor`. `token_embedding_sbh`: `Embed(x)`, on the stage of the split.
        """
        hidden = hidden_sbh if self.pre_process else self.input_tensor
        assert hidden is not None, "no input reached this stage"
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Frozen embeddings: Megatron's recompute gives no gradients to layers whose input does not require one.
            hidden = hidden.detach().requires_grad_()
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.config.sequence_parallel else contextlib.nullcontext():
            hidden = self._run_visits(hidden, streams, token_embedding_sbh)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)

    def _run_visits(
        self, hidden: torch.Tensor, streams: MicrobatchStreams, token_embedding_sbh: torch.Tensor | None
    ) -> torch.Tensor:
        visits = self.visits()
        split = next((index for index, visit in enumerate(visits) if visit.pass_name == SEQUENTIAL), -1)
        reached = hidden  # replaced where a loop begins
        for index, visit in enumerate(visits):
            if index == split and self.stage.has_split:
                assert token_embedding_sbh is not None, "the split needs Embed(x)"
                hidden = inject(hidden, token_embedding_sbh)
            if visit.enters_loop and visit.loop == 1:
                reached = hidden
            with contextlib.nullcontext() if self.loops.has_gradient(visit) else torch.no_grad():
                hidden = self._visit(visit, hidden, reached, streams)
        return hidden

    def _visit(self, visit: Visit, hidden: torch.Tensor, reached_sbh: torch.Tensor, streams: MicrobatchStreams) -> torch.Tensor:
        if visit.enters_loop and self.loop_entry is not None:
            hidden = self.loop_entry.enter(None if visit.loop == 1 else hidden, reached_sbh)
        hidden = self._run(self._call(visit, streams), hidden)
        return self.loop_entry.leave(hidden) if visit.leaves_loop and self.loop_entry is not None else hidden

    def _call(self, visit: Visit, streams: MicrobatchStreams) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = self.layers[self.stage.layers.index(visit.layer)]

        def call(hidden_sbh: torch.Tensor) -> torch.Tensor:
            return layer(hidden_states=hidden_sbh, packed_seq_params=streams.at(visit))[0]

        return call

    def _run(self, call: Callable[[torch.Tensor], torch.Tensor], hidden_sbh: torch.Tensor) -> torch.Tensor:
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(call, self.config.distribute_saved_activations, hidden_sbh)
        return call(hidden_sbh)
