"""Checkpoints by Megatron's `dist_checkpointing`: `torch_dist` files that any layout can load.

A checkpoint is written under a hidden name, renamed when complete, and only then named by `latest`: a reader never sees half of one.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_dmtd.config import Config, from_yaml, to_yaml
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training import paths
from megatron_dmtd.training.setup import Run

#: how optimizer state is laid out on disk: the form that every other layout can load
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
#: fields of `model` that say how weights were made or used, not what they are
_NOT_SHAPE = ("init_std", "max_position_embeddings")


def _layout(config: Config) -> tuple[int, int]:
    return config.parallel.tensor, config.parallel.pipeline


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


def _state(run: Run, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    model = run.model.sharded_state_dict(metadata=dict(_METADATA))
    state = {
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA)),
        "scheduler": run.scheduler.state_dict(),
        "progress": {"step": run.step, "rows": run.rows},
    }
    if with_random_state:
        state["random_state"] = _random_state()
    return state


def save_checkpoint(run: Run, directory: str | Path) -> Path:
    """Save everything that the run needs to go on. Returns the checkpoint's directory; all ranks must call."""
    root = Path(directory)
    partial, final = root / paths.partial_directory_name(run.step), root / paths.step_directory_name(run.step)
    is_writer = torch.distributed.get_rank() == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    state = _state(run, is_loading=False, with_random_state=True)
    dist_checkpointing.save(state, str(partial), content_metadata=dict(_METADATA))
    if is_writer:
        paths.write_atomically(partial / paths.CONFIG_FILE, to_yaml(run.config))
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        paths.write_atomically(root / paths.LATEST_FILE, final.name + "\n")
        _remove_old(root, keep_last=run.config.checkpoint.keep_last)
    torch.distributed.barrier()
    return final


def _remove_old(root: Path, *, keep_last: int) -> None:
    if keep_last > 0:
        for directory in paths.step_directories(root)[:-keep_last]:
            shutil.rmtree(directory)


def _differences(mine: Any, theirs: Any, *, section: str, skip: tuple[str, ...] = ()) -> list[str]:
    names = [item.name for item in dataclasses.fields(mine) if item.name not in skip]
    pairs = [(name, getattr(theirs, name), getattr(mine, name)) for name in names]
    return [f"{section}.{name} = {old} in the checkpoint, {new} in this run" for name, old, new in pairs if old != new]


def _refuse(differences: list[str], step_directory: Path, *, remedy: str) -> None:
    if differences:
        raise CheckpointError(
            found=f"{step_directory} is of another model: " + "; ".join(differences),
            required="the same model",
            remedy=remedy,
        )


def check_resumable(config: Config, step_directory: Path) -> Config:
    """The configuration that wrote a checkpoint. Raises `CheckpointError`, field by field, if it is of another model or method."""
    saved = from_yaml(step_directory / paths.CONFIG_FILE)
    differences = _differences(config.model, saved.model, section="model", skip=_NOT_SHAPE)
    differences += _differences(config.cycle, saved.cycle, section="cycle")
    _refuse(
        differences,
        step_directory,
        remedy="correct the settings, choose another checkpoint.dir, or start from its weights with checkpoint.init_from",
    )
    return saved


def check_weights(config: Config, step_directory: Path) -> None:
    """Raise `CheckpointError` if a checkpoint's weights do not fit this model. The method may differ: it adds no parameters."""
    saved = from_yaml(step_directory / paths.CONFIG_FILE)
    _refuse(
        _differences(config.model, saved.model, section="model", skip=_NOT_SHAPE),
        step_directory,
        remedy="correct the model's settings, or name another checkpoint",
    )


def load_checkpoint(run: Run, step_directory: Path) -> None:
    """Restore the whole run, in any layout. Raises `CheckpointError` if the checkpoint is of another model."""
    saved = check_resumable(run.config, step_directory)
    same_layout = _layout(saved) == _layout(run.config) and _saved_ranks(step_directory) == torch.distributed.get_world_size()
    request = _state(run, is_loading=True, with_random_state=same_layout)
    state = dist_checkpointing.load(request, str(step_directory))
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.step, run.rows = state["progress"]["step"], state["progress"]["rows"]
    if same_layout:
        torch.set_rng_state(state["random_state"]["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["random_state"]["tracker"])


def _saved_ranks(step_directory: Path) -> int:
    """Ranks whose random state a checkpoint holds."""
    metadata = torch.distributed.checkpoint.FileSystemReader(str(step_directory)).read_metadata()
    return sum(key.startswith("random_state/") for key in metadata.state_dict_metadata)


def load_weights(run: Run, path: str) -> None:
    """Start a new run from the model weights of a checkpoint, and nothing else."""
    step_directory = paths.find_step_directory(path)
    check_weights(run.config, step_directory)
    request = {"model": run.model.sharded_state_dict(metadata=dict(_METADATA))}
    state = dist_checkpointing.load(request, str(step_directory))
    run.model.load_state_dict(state["model"])
    run.optimizer.reload_model_params()
