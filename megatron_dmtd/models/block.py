"""The stack of layers of one pipeline stage, which runs the stage's visits in order.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.utils import make_viewless_tensor

from megatron_dmtd.architecture import Schedule, Visit
from megatron_dmtd.models.layers import layer_spec
from megatron_dmtd.models.norm import norm_spec
from megatron_dmtd.models.residual import inject
from megatron_dmtd.models.streams import MicrobatchStreams
from megatron_dmtd.parallel.placement import Stage


class CycleBlock(TransformerBlock):
    """Megatron's TransformerBlock, visiting its layers in the order of a schedule."""

    def __init__(self, config: Any, *, schedule: Schedule, stage: Stage, pg_collection: Any) -> None:
        self.stage = stage
        self.split = schedule.split if stage.has_split else None
        decoder = schedule.decoder
        super().__init__(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[layer_spec(decoder.layers[layer]) for layer in stage.layers],
                layer_norm=norm_spec(decoder.final_norm),
            ),
            pre_process=stage.has_input_embedding,
            post_process=stage.has_output,
            pg_collection=pg_collection,
            vp_stage=stage.virtual if config.virtual_pipeline_model_parallel_size else None,
        )
        numbers = tuple(layer.layer_number - 1 for layer in self.layers)
        assert numbers == stage.layers, f"Megatron numbers the layers {numbers}"

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
            for index, visit in enumerate(self.stage.visits, self.stage.first_visit):
                if index == self.split:
                    assert token_embedding_sbh is not None, "the split needs Embed(x)"
                    hidden = inject(hidden, token_embedding_sbh)
                hidden = self._run(self._call(visit, streams), hidden)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)

    def _call(self, visit: Visit, streams: MicrobatchStreams) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = self.layers[self.stage.layers.index(visit.layer)]

        def call(hidden_sbh: torch.Tensor) -> torch.Tensor:
            return layer(hidden_states=hidden_sbh, packed_seq_params=streams.at(visit))[0]

        return call

    def _run(self, call: Callable[[torch.Tensor], torch.Tensor], hidden_sbh: torch.Tensor) -> torch.Tensor:
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(call, self.config.distribute_saved_activations, hidden_sbh)
        return call(hidden_sbh)
