"""Layer specs: Megatron's own modules, with our attention core, and the last parallel layer of Refresh without its dead work.

Shape legend: s slots (split over ranks under sequence parallelism), b rows of all streams, h hidden width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dmtd.models.attention_core import StreamAttentionCore
from megatron_dmtd.models.norm import RMSNorm


class ShadowQueryAttention(SelfAttention):
    """Self-attention whose real rows give keys and values only: nothing reads the real stream after the last parallel layer."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queries of the shadow rows [s, B, H, D]; keys and values of both streams [s, 2B, G, D]."""
        real, shadow = (rows.contiguous() for rows in hidden_states.chunk(2, dim=1))
        query, shadow_key, shadow_value = super().get_query_key_value_tensors(shadow, *args, **kwargs)
        real_key, real_value = self._key_value(real)
        return query, torch.cat((real_key, shadow_key), dim=1), torch.cat((real_value, shadow_value), dim=1)

    def _key_value(self, hidden_sbh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.hidden_size_per_attention_head
        groups = self.num_query_groups_per_partition
        rows_per_group = self.num_attention_heads_per_partition // groups + 2
        # Megatron stores each group's queries, then its key, then its value.
        weight = self.linear_qkv.weight.view(groups, rows_per_group, width, -1)[:, -2:].flatten(0, 2)
        # The public forward accepts a weight of the full shape only.
        mixed = self.linear_qkv._forward_impl(
            input=hidden_sbh,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=False,  # the weight is a slice, which has no main_grad to accumulate into
            allreduce_dgrad=self.linear_qkv.allreduce_dgrad,
            sequence_parallel=self.linear_qkv.sequence_parallel,
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
            tp_group=self.tp_group,
        )
        key, value = mixed.view(*mixed.shape[:2], groups, 2 * width).split(width, dim=-1)
        return (self.k_layernorm(key) if self.k_layernorm is not None else key), value


class LastParallelLayer(TransformerLayer):
    """The last parallel layer of a Refresh model: two streams in, the shadow stream out."""

    def _forward_attention(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        attended = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=None,
            rotary_pos_emb=kwargs["rotary_pos_emb"],
            packed_seq_params=kwargs["packed_seq_params"],
        )
        residual = hidden_states.chunk(2, dim=1)[1]
        with self.bias_dropout_add_exec_handler():
            add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
            return add(attended, residual, self.hidden_dropout), None


def layer_spec(*, layer_kind: str, qk_norm: bool) -> ModuleSpec:
    """The spec of one layer. `layer_kind` is one of `attention_core.LAYER_KINDS`."""
    drops_real_rows = layer_kind == "last_parallel"
    attention = ModuleSpec(
        module=ShadowQueryAttention if drops_real_rows else SelfAttention,
        params={"attn_mask_type": AttnMaskType.arbitrary},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=functools.partial(StreamAttentionCore, layer_kind=layer_kind),
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm if qk_norm else IdentityOp,
            k_layernorm=RMSNorm if qk_norm else IdentityOp,
        ),
    )
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    return ModuleSpec(
        module=LastParallelLayer if drops_real_rows else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
