"""Everything a run needs before its first step, built from Megatron's parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megatron_dmtd.attention import select_backend
from megatron_dmtd.config import Config, num_microbatches
from megatron_dmtd.models.initialization import initialize_weights
from megatron_dmtd.models.model import CycleModel
from megatron_dmtd.models.transformer_config import DTYPES, transformer_config
from megatron_dmtd.parallel.placement import Placement, place
from megatron_dmtd.platform import Platform


@dataclass(kw_only=True, slots=True)
class Run:
    """The parts of one rank of a run, and how far it has come."""

    config: Config
    platform: Platform
    placement: Placement
    model: CycleModel
    """This rank's stage, unwrapped."""
    wrapped: DistributedDataParallel
    """The same, as the schedules call it."""
    optimizer: Any
    scheduler: OptimizerParamScheduler
    num_microbatches: int
    step: int = 0
    """Finished optimizer steps."""
    rows: int = 0
    """Rows of training data consumed, over all ranks."""


def build_model(config: Config, platform: Platform) -> CycleModel:
    """The rank's stage on its device, with initial weights that do not depend on the layout."""
    backend = select_backend(config.parallel.attention_backend, platform.device)
    model = CycleModel(config, transformer_config(config, on_cuda=platform.is_cuda), place(config), backend=backend)
    initialize_weights(model, seed=config.training.seed)
    return model.to(platform.device)


def _wrap(model: CycleModel, config: Config) -> DistributedDataParallel:
    parallel = config.parallel
    module = Float16Module(model.config, model) if config.training.precision == "bf16" else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    return DistributedDataParallel(config=model.config, ddp_config=ddp_config, module=module)


def _build_optimizer(config: Config, wrapped: DistributedDataParallel) -> Any:
    ours = config.optimizer
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=ours.lr,
        min_lr=ours.min_lr,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.eps,
        clip_grad=ours.clip_grad,
        bf16=config.training.precision == "bf16",
        params_dtype=DTYPES[config.training.precision],
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(optimizer_config, [wrapped])


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
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=config.training.steps,
        wd_incr_style="constant",
        wsd_decay_steps=ours.wsd_decay_steps or None,
        lr_wsd_decay_style="cosine" if ours.wsd_decay_steps else None,
        # The configuration decides, so that a run may be prolonged; checkpoints bring only how far it has come.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )


def _connect_schedules(model: CycleModel, wrapped: DistributedDataParallel, optimizer: Any) -> None:
    """What Megatron's pipeline schedules look up on the model's configuration."""
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    if wrapped.ddp_config.overlap_grad_reduce:
        model.config.no_sync_func = wrapped.no_sync


def build_run(config: Config, platform: Platform) -> Run:
    """Model, optimizer and scheduler of this rank. Call `init_parallel` first."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=platform.is_cuda)
    model = build_model(config, platform)
    wrapped = _wrap(model, config)
    if parallel_state.get_data_parallel_world_size() > 1:
        wrapped.broadcast_params()
    optimizer = _build_optimizer(config, wrapped)
    _connect_schedules(model, wrapped, optimizer)
    return Run(
        config=config,
        platform=platform,
        placement=model.placement,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=_build_scheduler(config, optimizer),
        num_microbatches=num_microbatches(config, torch.distributed.get_world_size()),
    )
