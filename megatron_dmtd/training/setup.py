"""Everything a run needs before its first step, built from Megatron's parts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megatron_dmtd.attention import select_backend
from megatron_dmtd.config import Config
from megatron_dmtd.models.gradients import finalize_gradients
from megatron_dmtd.models.initialization import initialize_weights
from megatron_dmtd.models.model import CycleModel
from megatron_dmtd.models.transformer_config import DTYPES, transformer_config
from megatron_dmtd.parallel.placement import place
from megatron_dmtd.platform import Platform
from megatron_dmtd.training.objectives import make_objective
from megatron_dmtd.training.state import RunState
from megatron_dmtd.training.unit_weights import keep_unit_weights


def build_models(config: Config, platform: Platform) -> list[CycleModel]:
    """The rank's stages on its device, with initial weights that do not depend on the layout."""
    backend = select_backend(config.parallel.attention_backend, platform.device, head_dim=config.model.head_dim)
    megatron_config, placement = transformer_config(config, on_cuda=platform.is_cuda), place(config)
    models = []
    for stage in placement.stages_of(parallel_state.get_pipeline_model_parallel_rank()):
        model = CycleModel(config, megatron_config, placement, stage, backend=backend)
        initialize_weights(model, seed=config.training.seed)
        if config.training.freeze_embeddings:
            model.freeze_embeddings()
        models.append(model.to(platform.device))
    return models


def _wrap(model: CycleModel, config: Config, *, is_first: bool) -> DistributedDataParallel:
    parallel = config.parallel
    module = Float16Module(model.config, model) if config.training.precision == "bf16" else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    # Later stages of a rank finish their backward pass first and all at once: buckets would only add messages.
    wrapped = DistributedDataParallel(config=model.config, ddp_config=ddp_config, module=module, disable_bucketing=not is_first)
    _count_padding_as_state(wrapped)
    return wrapped


def _count_padding_as_state(wrapped: DistributedDataParallel) -> None:
    """Keep the padding between buckets in the optimizer state that is gathered for a checkpoint.

    Megatron-Core 0.16.1 leaves it out (`get_parameter_state_dp_zero`) and then cuts parameters at places that count it
    (`sharded_param_state_fully_reshardable`, "issue #504" there): moments and fp32 copies of all parameters after a padded
    bucket would be stored shifted, the last ones as zeros. To be removed when `numel_unpadded` and `param_index_map` agree there.
    """
    for buffer in wrapped.buffers:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def _has_unit_weights(config: Config) -> bool:
    return config.model.normalized and config.optimizer.unit_weights


def _weight_decay(config: Config) -> float:
    """None for a model of scales and unit vectors: it would only shorten what is divided by its norm again."""
    return 0.0 if _has_unit_weights(config) else config.optimizer.weight_decay


def _build_optimizer(config: Config, wrapped: list[DistributedDataParallel]) -> Any:
    ours = config.optimizer
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=ours.lr,
        min_lr=ours.min_lr,
        weight_decay=_weight_decay(config),
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.eps,
        clip_grad=ours.clip_grad,
        bf16=config.training.precision == "bf16",
        params_dtype=DTYPES[config.training.precision],
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(optimizer_config, wrapped)


def _build_scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    ours = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.warmup_steps,
        lr_decay_steps=ours.decay_steps or config.training.steps,
        lr_decay_style=ours.decay,
        start_wd=_weight_decay(config),
        end_wd=_weight_decay(config),
        wd_incr_steps=config.training.steps,
        wd_incr_style="constant",
        wsd_decay_steps=ours.wsd_decay_steps or None,
        lr_wsd_decay_style=ours.wsd_decay_style if ours.wsd_decay_steps else None,
        # The configuration decides, so that a run may be prolonged; checkpoints bring only how far it has come.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )


def _connect_schedules(megatron_config: Any, wrapped: list[DistributedDataParallel], optimizer: Any) -> None:
    """What Megatron's pipeline schedules look up on the model's configuration."""
    megatron_config.grad_scale_func = optimizer.scale_loss
    megatron_config.finalize_model_grads_func = finalize_gradients
    if wrapped[0].ddp_config.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        megatron_config.no_sync_func = waits if len(waits) > 1 else waits[0]


def build_run(config: Config, platform: Platform) -> RunState:
    """Objective, model, optimizer and scheduler of this rank. Call `init_parallel` first."""
    objective = make_objective(config)
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=platform.is_cuda)
    models = build_models(config, platform)
    wrapped = [_wrap(model, config, is_first=index == 0) for index, model in enumerate(models)]
    if parallel_state.get_data_parallel_world_size() > 1:
        for chunk in wrapped:
            chunk.broadcast_params()
    optimizer = _build_optimizer(config, wrapped)
    if _has_unit_weights(config):
        keep_unit_weights(optimizer, models)
    _connect_schedules(models[0].config, wrapped, optimizer)
    return RunState(
        config=config,
        platform=platform,
        placement=models[0].placement,
        objective=objective,
        models=models,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=_build_scheduler(config, optimizer),
    )
