"""What a checkpoint holds, as the sharded state that Megatron's `dist_checkpointing` reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_dmtd.training.progress import Progress
from megatron_dmtd.training.state import RunState

#: how optimizer state is stored: the form that every other layout can load
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
#: what a parameter group takes from a checkpoint: its tensors, and how often they were updated
_LOADED = ("params", "step")


def _random_state() -> ShardedObject:
    """Generator states, one entry per rank. A checkpoint of another layout is loaded without them."""
    state = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("random_state", state, sizes, ranks, replica_id=0)


def _give_moments(optimizer: Any) -> None:
    """Create Adam's moments, zero, for a run that has made no step yet: Megatron can neither save nor load missing ones."""
    for part in optimizer.chained_optimizers:
        if not getattr(part, "is_stub_optimizer", False):
            part.init_state_fn(part.optimizer, part.config)


def model_state(run: RunState) -> dict[str, Any]:
    """The weights alone."""
    return run.sharded_model_state(METADATA)


def whole_state(run: RunState, progress: Progress, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    """Everything that a run needs to go on. Collective: Megatron gathers optimizer state over data-parallel ranks."""
    _give_moments(run.optimizer)
    model = model_state(run)
    state = {
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(METADATA)),
        "scheduler": run.scheduler.state_dict(),
        "progress": {"step": run.step, "rows": run.rows} | progress.to_dict(),
        "objective": run.objective.state_dict(),
    }
    if with_random_state:
        state["random_state"] = _random_state()
    return state


def _load_optimizer(run: RunState, state: dict[str, Any]) -> None:
    """Take moments, fp32 copies and counts of steps from a checkpoint, and nothing that the configuration sets.

    A loaded parameter group brings the learning rates, betas, epsilon and weight decay of the run that saved it, and Megatron's
    scheduler prefers a group's `max_lr` and `min_lr` to its own: without this a resumed run would announce a new value and go on
    with the old one.
    """
    configured = [{name: value for name, value in group.items() if name not in _LOADED} for group in run.optimizer.param_groups]
    run.optimizer.load_state_dict(state)
    for group, settings in zip(run.optimizer.param_groups, configured, strict=True):
        group.update(settings)


def restore(run: RunState, state: dict[str, Any]) -> Progress:
    """Put a loaded state into the run.

    Without an entry for the random state, that stays as it is; checkpoints of earlier versions have none for the objective.
    """
    run.load_model_state(state["model"])
    _load_optimizer(run, state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])  # also sets the rates of the groups, from the configuration's values
    run.step, run.rows = state["progress"]["step"], state["progress"]["rows"]
    if "random_state" in state:
        torch.set_rng_state(state["random_state"]["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["random_state"]["tracker"])
    if "objective" in state:
        run.objective.load_state_dict(state["objective"])
    return Progress.from_dict(state["progress"], run.objective, device=run.platform.device)
