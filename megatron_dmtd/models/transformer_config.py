"""The one crossing from our configuration to Megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch

from megatron_dmtd.config import Config
from megatron_dmtd.parallel.placement import Placement, place

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pipeline_layout(placement: Placement) -> list[list[str]] | None:
    """Megatron's list of what each stage holds; None for one stage."""
    if len(placement.stages) == 1:
        return None
    return [
        ["embedding"] * stage.has_input_embedding + ["decoder"] * stage.num_layers + ["loss"] * stage.has_output
        for stage in placement.stages
    ]


def _shapes_vary_between_stages(placement: Placement) -> bool:
    """Whether hidden states of several streams, whose rows are more than a microbatch's, cross a stage boundary."""
    return any(len(stage.visits[0].streams) > 1 for stage in placement.stages[1:])


def _recompute_settings(config: Config) -> dict[str, Any]:
    if config.parallel.recompute == "none":
        return {}
    if config.parallel.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def transformer_config(config: Config, *, on_cuda: bool) -> Any:
    """Megatron's TransformerConfig of a validated configuration.

    Losses are sums over tokens, divided by the number of valid tokens of the whole global batch
    (`calculate_per_token_loss`); initial weights are ours (`initialization.py`).
    """
    from megatron.core.transformer import TransformerConfig

    from megatron_dmtd.models.layers import layer_settings

    parallel, placement = config.parallel, place(config)
    decoder = placement.schedule.decoder
    dtype = DTYPES[config.training.precision]
    return TransformerConfig(
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden_size,
        # Those of the first layer. Layers that differ have their own (`layers.StreamLayer`).
        **layer_settings(decoder.layers[0]),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=config.model.init_std,
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        pipeline_model_parallel_layout=pipeline_layout(placement),
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        # With virtual stages and the default pair, Megatron-Core 0.16.1 trains silently wrong on two ranks.
        overlap_p2p_comm=parallel.virtual_stages > 1,
        batch_p2p_comm=parallel.virtual_stages == 1,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=_shapes_vary_between_stages(placement),
        moe_token_dispatcher_type="alltoall",  # required with variable_seq_lengths, for dense models too
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=config.training.precision == "bf16",
        calculate_per_token_loss=True,
        deterministic_mode=config.training.deterministic,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=on_cuda,  # keeps the two halves of the gated layer and recomputes the rest
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **_recompute_settings(config),
    )
