"""The stack of layers of one pipeline stage: parallel layers, the split, sequential layers.

Shape legend: s slots (split over ranks under sequence parallelism), b rows of the streams in a layer, h hidden width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.utils import make_viewless_tensor

from megatron_dmtd.architecture import Stream, Visit
from megatron_dmtd.config import ModelConfig
from megatron_dmtd.models.layers import layer_spec
from megatron_dmtd.models.norm import RMSNorm
from megatron_dmtd.models.streams import Streams
from megatron_dmtd.parallel.placement import Stage


def layer_kind(visit: Visit) -> str:
    """The kind of a layer: see `attention_core.LAYER_KINDS`."""
    if visit.streams == (Stream.REAL,):
        return "sequential"
    return "last_parallel" if len(visit.outputs) < len(visit.streams) else "parallel"


class CycleBlock(TransformerBlock):
    """Megatron's TransformerBlock, whose layers differ in kind, and which adds `Embed(x)` before the first sequential layer."""

    def __init__(self, config: Any, *, model: ModelConfig, stage: Stage, pg_collection: Any) -> None:
        self.kinds = [layer_kind(visit) for visit in stage.visits]
        self.split = self.kinds.index("sequential") if stage.has_split else None
        specs = [layer_spec(layer_kind=kind, qk_norm=model.qk_norm) for kind in self.kinds]
        super().__init__(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
            pre_process=stage.has_input_embedding,
            post_process=stage.has_output,
            pg_collection=pg_collection,
            vp_stage=stage.virtual if config.virtual_pipeline_model_parallel_size else None,
        )
        assert [layer.layer_number - 1 for layer in self.layers] == list(stage.layers), "Megatron numbers the layers otherwise"

    def forward(
        self,
        hidden_sbh: torch.Tensor | None,
        *,
        streams: Streams,
        token_embedding_sbh: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run this stage.

        `hidden_sbh`: all streams, on the first stage; later stages take what the schedule handed to `set_input_tensor`.
        `token_embedding_sbh`: `Embed(x)`, on the stage of the split.
        """
        hidden = hidden_sbh if self.pre_process else self.input_tensor
        assert hidden is not None, "no input reached this stage"
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Frozen embeddings: Megatron's recompute gives no gradients to layers whose input asks for none.
            hidden = hidden.detach().requires_grad_()
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.config.sequence_parallel else contextlib.nullcontext():
            for index, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
                if index == self.split:
                    assert token_embedding_sbh is not None, "the split needs Embed(x)"
                    hidden = hidden + token_embedding_sbh
                hidden = self._run(self._call(layer, kind, streams), hidden)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)

    def _call(self, layer: torch.nn.Module, kind: str, streams: Streams) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(hidden_sbh: torch.Tensor) -> torch.Tensor:
            return layer(
                hidden_states=hidden_sbh,
                attention_mask=None,
                rotary_pos_emb=streams.rotary(kind),
                packed_seq_params=streams,
            )[0]

        return call

    def _run(self, call: Callable[[torch.Tensor], torch.Tensor], hidden_sbh: torch.Tensor) -> torch.Tensor:
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(call, self.config.distribute_saved_activations, hidden_sbh)
        return call(hidden_sbh)
