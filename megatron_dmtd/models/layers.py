"""Builds a layer from its LayerSpec: Megatron's TransformerLayer around the parts that the builders make.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dmtd.architecture import LayerSpec
from megatron_dmtd.models.attention import attention_part
from megatron_dmtd.models.mlp import mlp_part
from megatron_dmtd.models.norm import norm_spec
from megatron_dmtd.models.residual import residual_part
from megatron_dmtd.models.streams import VisitStreams, select_rows


def layer_settings(layer: LayerSpec) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that describe this layer."""
    parts = attention_part(layer.attention).settings | mlp_part(layer.mlp).settings
    return parts | {"normalization": "RMSNorm", "layernorm_epsilon": layer.norm.eps}


def _with_settings(config: Any, settings: dict[str, Any]) -> Any:
    """A TransformerConfig with these fields; the same object if it has them, so that equal layers share one."""
    changed = {name: value for name, value in settings.items() if getattr(config, name) != value}
    if not changed:
        return config
    other = copy.copy(config)
    for name, value in changed.items():
        setattr(other, name, value)
    return other


class StreamLayer(TransformerLayer):
    """A layer whose visits may end streams: of those, only keys and values are computed."""

    def __init__(self, config: Any, submodules: TransformerLayerSubmodules, *, settings: dict[str, Any], **keywords: Any) -> None:
        super().__init__(_with_settings(config, settings), submodules, **keywords)
        # Megatron turns gradients on here, for fused kernels that are not used. Runs of a loop may be without gradients.
        self.bias_dropout_add_exec_handler = contextlib.nullcontext

    def _forward_attention(
        self, hidden_states: torch.Tensor, *, packed_seq_params: VisitStreams, **keywords: Any
    ) -> tuple[torch.Tensor, None]:
        visit = packed_seq_params
        if not visit.ending:
            return super()._forward_attention(hidden_states, packed_seq_params=visit, **keywords)
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(
            select_rows(normed, visit.streams, visit.outputs),
            attention_mask=None,
            key_value_states=select_rows(normed, visit.streams, visit.ending),
            packed_seq_params=visit,
        )
        residual = select_rows(hidden_states, visit.streams, visit.outputs)
        with self.bias_dropout_add_exec_handler():
            add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
            return add(attended, residual, self.hidden_dropout), None


def layer_spec(layer: LayerSpec, config: Any) -> ModuleSpec:
    """The spec from which Megatron's block builds a layer. What differs between visits is passed with each call.

    `config` is Megatron's, which it does not pass to what joins the residual stream.
    """
    return ModuleSpec(
        module=StreamLayer,
        params={"settings": layer_settings(layer)},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_spec(layer.norm),
            self_attention=attention_part(layer.attention).spec,
            self_attn_bda=residual_part(layer.attention_step, config),
            pre_mlp_layernorm=norm_spec(layer.norm),
            mlp=mlp_part(layer.mlp).spec,
            mlp_bda=residual_part(layer.mlp_step, config),
        ),
    )
