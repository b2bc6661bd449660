"""The Parallel DMTD decoder, or the same decoder as vanilla, built from Megatron-Core's modules.

Parameters have the names, shapes and count of Megatron's GPTModel, so any Qwen3-like decoder has the same weights.

Shape legend: B rows, N slots of a row, V padded vocabulary of this rank. Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from megatron_dmtd.architecture import Stream
from megatron_dmtd.attention import StreamLayout, make_backend
from megatron_dmtd.config import Config
from megatron_dmtd.cycle import shadow_ids
from megatron_dmtd.models.block import CycleBlock
from megatron_dmtd.models.rotary import RotaryAngles
from megatron_dmtd.models.scales import factor, scale_parameter, split_scales
from megatron_dmtd.models.streams import MicrobatchStreams, select_rows
from megatron_dmtd.models.vocab import padded_vocab_size
from megatron_dmtd.parallel.placement import Placement, Stage

TABLE_KEY = "embedding.word_embeddings.weight"
OUTPUT_KEY = "output_layer.weight"
INJECTION_KEY = "decoder.injection.weight"
LOGIT_SCALE_KEY = "logit_scale"
#: projections back to the residual stream: split along their inputs, every other matrix along its outputs
ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")


class CycleModel(LanguageModule):
    """One pipeline stage of the decoder."""

    def __init__(self, config: Config, transformer_config: Any, placement: Placement, stage: Stage, *, backend: str) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config=transformer_config, pg_collection=groups)
        self.settings = config
        self.placement = placement
        self.stage = stage
        self.vp_stage = stage.virtual if transformer_config.virtual_pipeline_model_parallel_size else None
        self.backend_name = backend
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = self.stage.has_input_embedding
        self.post_process = self.stage.has_output
        self.schedule = placement.schedule
        self.padded_vocab_size = padded_vocab_size(self.schedule.decoder.vocab_size)
        self._build(groups)
        self._mark_partitions()
        self._mark_table_copies()

    def _build(self, groups: Any) -> None:
        decoder = self.schedule.decoder
        if self.stage.has_embedding:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.padded_vocab_size,
                max_sequence_length=decoder.max_position_embeddings,
                position_embedding_type="rope",
                tp_group=groups.tp,
            )
        self.rotary_angles = RotaryAngles(decoder.rotary_profiles)
        self.decoder = CycleBlock(self.config, schedule=self.schedule, stage=self.stage, pg_collection=groups)
        if self.stage.has_output:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                decoder.hidden_size,
                self.padded_vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=decoder.tie_word_embeddings and self.stage.has_embedding,
                tp_group=groups.tp,
            )
        self.logit_scale = None
        if self.stage.has_output and decoder.logit_scale is not None:
            rows = self.padded_vocab_size // groups.tp.size()
            self.logit_scale = scale_parameter(decoder.logit_scale, rows, self.config, is_split=True)

    def _mark_partitions(self) -> None:
        """Mark the matrices that are split over tensor ranks. Megatron does so when it initialises weights, which we do instead.

        Its gradient norm counts parameters without the mark once per tensor-parallel group.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and name != INJECTION_KEY:
                dim = 1 if name.endswith(ROW_PARALLEL) else 0
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    # --- the embedding table and its copies ---------------------------------------------------------------------------------

    #: If true, Megatron sums the gradients of the copies on the first and last stage. Ours may be on any stage, and two on one
    #: rank: `gradients.finalize_gradients` sums them all.
    share_embeddings_and_output_weights = False

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The stage's copy of the embedding table, if it holds one."""
        if self.stage.has_embedding:
            return self.embedding.word_embeddings.weight
        if self.stage.has_output and self.placement.tied:
            return self.output_layer.weight
        return None

    def freeze_embeddings(self) -> None:
        """Train neither the embedding table nor the output head. Call it before the model is wrapped."""
        for weight in (self.shared_embedding_or_output_weight(), self.output_layer.weight if self.stage.has_output else None):
            if weight is not None:
                weight.requires_grad = False

    def _mark_table_copies(self) -> None:
        """Marks for Megatron's optimizers: which parameters are copies of one, and which copy counts in the gradient norm."""
        table = self.shared_embedding_or_output_weight()
        if table is not None:
            table.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
            if len(self.placement.table_stages) > 1:
                table.shared_embedding = True  # type: ignore[attr-defined]
                if not self.stage.has_input_embedding:
                    table.shared = True  # type: ignore[attr-defined]
        if self.stage.has_output and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Megatron's sharded state; every copy of the table is a replica of the first stage's."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        state |= split_scales(self, prefix, sharded_offsets, metadata, tp_group=self.tp_group)
        for name in (TABLE_KEY, OUTPUT_KEY, LOGIT_SCALE_KEY):
            if prefix + name in state:
                state[prefix + name].allow_shape_mismatch = True
        table = self.shared_embedding_or_output_weight()
        if table is not None and not self.stage.has_input_embedding:
            own = prefix + (TABLE_KEY if self.stage.has_embedding else OUTPUT_KEY)
            state[own] = make_tp_sharded_tensor_for_checkpoint(
                tensor=table,
                key=prefix + TABLE_KEY,
                replica_id=(self.stage.index, 0, parallel_state.get_data_parallel_rank(with_context_parallel=True)),
                allow_shape_mismatch=True,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return state

    # --- forward -------------------------------------------------------------------------------------------------------------

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the schedule received from the previous stage; [s, b, h]."""
        tensors = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        assert len(tensors) == 1, f"{len(tensors)} tensors for one stage"
        self.decoder.set_input_tensor(tensors[0])

    def forward(
        self,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        labels_BN: torch.Tensor | None = None,
        *,
        document_lengths: tuple[tuple[int, ...], ...],
    ) -> torch.Tensor:
        """One stage of the teacher-forced forward pass (docs/method.md, sections 1 to 5).

        Every document must fill whole cycles; `document_lengths` are those of `Batch`. Returns the hidden states for the next
        stage [s, b, h]; on the last stage the per-slot loss [B, N] (labels given) or the logits over the vocabulary
        [B, N, vocab] (gathered over tensor ranks).
        """
        streams = self._streams(positions_BN, document_lengths)
        hidden_sbh, token_embedding_sbh = self._embed(tokens_BN, positions_BN)
        hidden = self.decoder(hidden_sbh, streams=streams, token_embedding_sbh=token_embedding_sbh)
        if not self.stage.has_output:
            return hidden
        return self._head(hidden, labels_BN)

    def _streams(self, positions_BN: torch.Tensor, document_lengths: tuple[tuple[int, ...], ...]) -> MicrobatchStreams:
        layout = StreamLayout(positions_BN=positions_BN, document_lengths=document_lengths, method=self.schedule.method)
        return MicrobatchStreams(backend=make_backend(self.backend_name, layout), angles=self.rotary_angles(positions_BN))

    def _embed(self, tokens_BN: torch.Tensor, positions_BN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The streams that enter the first visit, and `Embed(x)` for the split; None where this stage needs none."""
        entering = self.stage.visits[0].streams if self.stage.has_input_embedding else ()
        injected = (Stream.REAL,) if self.stage.has_split else ()
        needed = tuple(stream for stream in Stream if stream in entering + injected)
        if not needed:
            return None, None
        ids = [self._stream_ids(stream, tokens_BN, positions_BN) for stream in needed]
        if len(needed) == 1:
            embedded_sbh = self.embedding(ids[0], positions_BN)
        else:
            embedded_sbh = self.embedding(torch.cat(ids), torch.cat((positions_BN,) * len(needed)))
        hidden_sbh = select_rows(embedded_sbh, needed, entering) if entering else None
        return hidden_sbh, select_rows(embedded_sbh, needed, injected) if injected else None

    def _stream_ids(self, stream: Stream, tokens_BN: torch.Tensor, positions_BN: torch.Tensor) -> torch.Tensor:
        if stream is Stream.REAL:
            return tokens_BN
        method = self.schedule.method
        return shadow_ids(tokens_BN, positions_BN, cycle_length=method.cycle_length, mask_token_id=method.mask_token_id)

    def _head(self, hidden_sbh: torch.Tensor, labels_BN: torch.Tensor | None) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.placement.tied else None
        logits_NBV, _ = self.output_layer(hidden_sbh, weight=weight)
        scale = self.schedule.decoder.logit_scale
        if self.logit_scale is not None and scale is not None:
            logits_NBV = logits_NBV * factor(self.logit_scale, scale)  # stays fp32: the loss is computed in it
        self._hide_padded_rows(logits_NBV)
        if labels_BN is not None:
            return self.compute_language_model_loss(labels_BN, logits_NBV)
        full = tensor_parallel.gather_from_tensor_model_parallel_region(logits_NBV, group=self.tp_group)
        return full[..., : self.schedule.decoder.vocab_size].transpose(0, 1).contiguous()

    def _hide_padded_rows(self, logits_NBV: torch.Tensor) -> None:
        """Give rows that only pad the vocabulary zero probability, so that the loss is that of the real vocabulary."""
        first = self.tp_group.rank() * logits_NBV.shape[-1]
        num_real = max(0, self.schedule.decoder.vocab_size - first)
        if num_real < logits_NBV.shape[-1]:
            logits_NBV[..., num_real:] = float("-inf")
