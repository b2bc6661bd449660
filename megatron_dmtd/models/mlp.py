"""The feed-forward part of a layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import silu

from megatron_dmtd.architecture import MLPSpec
from megatron_dmtd.models.norm import unit
from megatron_dmtd.models.parts import Part
from megatron_dmtd.models.scales import factor, scale_parameter, split_scales

_PROJECTIONS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class ScaledMLP(MLP):
    """Megatron's gated layer with learned scales of gate and up, and a norm of the activation before the projection down."""

    mlp: ClassVar[MLPSpec]
    """Of a class made for it: Megatron's layer passes nothing but its configuration to a module that it does not know."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, _PROJECTIONS, ffn_hidden_size=self.mlp.intermediate_size)
        assert self.mlp.inner_norm is None or self.mlp.inner_norm.kind == "unit", self.mlp
        width = self.mlp.intermediate_size // self.tp_group.size()
        self.gate_scale = self.up_scale = None
        if self.mlp.gate_scale is not None:
            self.gate_scale = scale_parameter(self.mlp.gate_scale, width, config, is_split=True)
        if self.mlp.up_scale is not None:
            self.up_scale = scale_parameter(self.mlp.up_scale, width, config, is_split=True)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's; hidden states are [s, b, h]."""
        mixed, _bias = self.linear_fc1(hidden_states)
        gate, up = mixed.chunk(2, dim=-1)
        if self.gate_scale is not None and self.mlp.gate_scale is not None:
            gate = (gate * factor(self.gate_scale, self.mlp.gate_scale)).to(mixed.dtype)
        if self.up_scale is not None and self.mlp.up_scale is not None:
            up = (up * factor(self.up_scale, self.mlp.up_scale)).to(mixed.dtype)
        inner = silu(gate) * up
        if self.mlp.inner_norm is not None:
            inner = unit(inner, self.mlp.inner_norm.eps, group=self.tp_group)
        output, bias = self.linear_fc2(inner)
        return output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Megatron's, and the scales."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | split_scales(self, prefix, sharded_offsets, metadata, tp_group=self.tp_group)


def mlp_part(mlp: MLPSpec) -> Part:
    """Megatron's gated feed-forward layer with SiLU, or its scaled form."""
    is_scaled = mlp.gate_scale is not None or mlp.up_scale is not None or mlp.inner_norm is not None
    return Part(
        spec=type("ScaledMLP", (ScaledMLP,), {"mlp": mlp}) if is_scaled else ModuleSpec(module=MLP, submodules=_PROJECTIONS),
        settings={"ffn_hidden_size": mlp.intermediate_size, "gated_linear_unit": True, "activation_func": silu},
    )
