"""The attention part of a layer: Megatron's self-attention around the core that handles the streams separately.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dmtd.architecture import AttentionSpec
from megatron_dmtd.models.attention_core import StreamAttentionCore
from megatron_dmtd.models.norm import norm_spec, unit
from megatron_dmtd.models.parts import Part
from megatron_dmtd.models.scales import factor, scale_parameter, split_scales
from megatron_dmtd.models.streams import VisitStreams


class StreamAttention(SelfAttention):
    """Self-attention to which some rows may contribute keys and values only: those of streams that end at this visit."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Queries of `hidden_states`; keys and values of `key_value_states`, if there are such rows, and of `hidden_states`."""
        if key_value_states is None:
            return super().get_query_key_value_tensors(hidden_states, None, *args, **kwargs)
        query, key, value = super().get_query_key_value_tensors(hidden_states.contiguous(), None, *args, **kwargs)
        ending_key, ending_value = self._key_value(key_value_states.contiguous())
        return query, torch.cat((ending_key, key), dim=1), torch.cat((ending_value, value), dim=1)

    def _key_value(self, hidden_sbh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        bias = self.linear_qkv.bias
        # The public forward accepts a weight of the full shape only.
        mixed = self.linear_qkv._forward_impl(
            input=hidden_sbh,
            weight=self._key_value_rows(self.linear_qkv.weight),
            bias=None if bias is None else self._key_value_rows(bias),
            gradient_accumulation_fusion=False,  # the weight is a slice, which has no main_grad to accumulate into
            allreduce_dgrad=self.linear_qkv.allreduce_dgrad,
            sequence_parallel=self.linear_qkv.sequence_parallel,
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
            tp_group=self.tp_group,
        )
        key, value = mixed.view(*mixed.shape[:2], groups, 2 * width).split(width, dim=-1)
        return (self.k_layernorm(key) if self.k_layernorm is not None else key), value

    def _key_value_rows(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of `linear_qkv` for keys and values: Megatron stores each group's queries, then its key, then its value."""
        groups = self.num_query_groups_per_partition
        rows_per_group = self.num_attention_heads_per_partition // groups + 2
        by_group = parameter.view(groups, rows_per_group, self.hidden_size_per_attention_head, *parameter.shape[1:])
        return by_group[:, -2:].flatten(0, 2)


class ScaledAttention(StreamAttention):
    """The same with a scale of the rotated queries, a gate on the heads, and a norm over all heads; each may be absent."""

    def __init__(self, *, attention: AttentionSpec, **keywords: Any) -> None:
        super().__init__(**keywords)
        assert attention.output_norm is None or attention.output_norm.kind == "unit", attention
        self.attention = attention
        width = attention.query_size // self.tp_group.size()
        self.query_scale = self.linear_gate = self.gate_scale = None
        if attention.query_scale is not None:
            self.query_scale = scale_parameter(attention.query_scale, width, self.config, is_split=True)
        if attention.gate is not None:
            self.linear_gate = ColumnParallelLinear(
                self.config.hidden_size,
                attention.query_size,
                config=self.config,
                init_method=self.config.init_method,
                gather_output=False,
                bias=False,
                tp_group=self.tp_group,
            )
            self.gate_scale = scale_parameter(attention.gate, width, self.config, is_split=True)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        key_value_states: torch.Tensor | None = None,
        *,
        packed_seq_params: VisitStreams,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's: the output [s, b, h], and its bias."""
        query, key, value = self.get_query_key_value_tensors(hidden_states, key_value_states)
        scale = self.attention.query_scale
        query_factor = None if self.query_scale is None or scale is None else factor(self.query_scale, scale)

        def attend(*inputs: Any) -> torch.Tensor:
            *states, by_channel = inputs
            return self.core_attention(*states, None, packed_seq_params=packed_seq_params, query_factor=by_channel)

        if self.checkpoint_core_attention and self.training:
            joined = tensor_parallel.checkpoint(attend, False, query, key, value, query_factor)
        else:
            joined = attend(query, key, value, query_factor)
        return self.linear_proj(self._finished(joined, hidden_states))

    def _finished(self, joined: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.linear_gate is not None and self.gate_scale is not None and self.attention.gate is not None:
            gate, _ = self.linear_gate(hidden_states)
            opened = torch.sigmoid(gate * factor(self.gate_scale, self.attention.gate))
            joined = joined * opened.to(joined.dtype)
        norm = self.attention.output_norm
        return joined if norm is None else unit(joined, norm.eps, group=self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Megatron's, with the scales as shards."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | split_scales(self, prefix, sharded_offsets, metadata, tp_group=self.tp_group)


class BiasedRowParallelLinear(RowParallelLinear):
    """An output projection with a bias. Megatron's one setting for it, `add_bias_linear`, would give the MLP biases too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


def attention_part(attention: AttentionSpec) -> Part:
    """Grouped-query attention over the streams of a visit."""
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=functools.partial(StreamAttentionCore, attention=attention),
        linear_proj=BiasedRowParallelLinear if attention.output_bias else RowParallelLinear,
        q_layernorm=norm_spec(attention.qk_norm),
        k_layernorm=norm_spec(attention.qk_norm),
    )
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.arbitrary}
    is_scaled = attention.query_scale is not None or attention.gate is not None or attention.output_norm is not None
    module, own = (ScaledAttention, {"attention": attention}) if is_scaled else (StreamAttention, {})
    return Part(
        spec=ModuleSpec(module=module, params=params | own, submodules=submodules),
        settings={
            "num_attention_heads": attention.num_attention_heads,
            "num_query_groups": attention.num_key_value_heads,
            "kv_channels": attention.head_dim,
            "qk_layernorm": attention.qk_norm is not None,
            "add_qkv_bias": attention.qkv_bias,
        },
    )
