"""The attention part of a layer: Megatron's self-attention around the core that handles the streams separately.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dmtd.architecture import AttentionSpec
from megatron_dmtd.models.attention_core import StreamAttentionCore
from megatron_dmtd.models.norm import norm_spec
from megatron_dmtd.models.parts import Part


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
    return Part(
        spec=ModuleSpec(module=StreamAttention, params={"attn_mask_type": AttnMaskType.arbitrary}, submodules=submodules),
        settings={
            "num_attention_heads": attention.num_attention_heads,
            "num_query_groups": attention.num_key_value_heads,
            "kv_channels": attention.head_dim,
            "qk_layernorm": attention.qk_norm is not None,
            "add_qkv_bias": attention.qkv_bias,
        },
    )
