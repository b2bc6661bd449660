"""The feed-forward part of a layer."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import silu

from megatron_dmtd.architecture import MLPSpec
from megatron_dmtd.models.parts import Part


def mlp_part(mlp: MLPSpec) -> Part:
    """Megatron's gated feed-forward layer with SiLU."""
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return Part(
        spec=ModuleSpec(module=MLP, submodules=submodules),
        settings={"ffn_hidden_size": mlp.intermediate_size, "gated_linear_unit": True, "activation_func": silu},
    )
