"""Checkpoints of a run: save, resume in any layout, start from the weights of another. `saving.py` says how they are written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dmtd.config import Config
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.infra import checksums
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.compatibility import check_resumable, check_weights
from megatron_dmtd.training.checkpoints.initial import find_initial
from megatron_dmtd.training.checkpoints.saving import Saver
from megatron_dmtd.training.checkpoints.sharded_state import model_state, restore, whole_state
from megatron_dmtd.training.health.consensus import gathered
from megatron_dmtd.training.progress import Progress
from megatron_dmtd.training.state import RunState
from megatron_dmtd.weights.ranks import load_directory


def save_checkpoint(run: RunState, directory: str | Path, progress: Progress | None = None) -> Path:
    """Save everything that the run needs to resume, and wait until it is complete. Returns the checkpoint's directory.

    All ranks must call. Raises `SaveError` on all of them if any could not write.
    """
    return Saver(run, directory).save(progress or Progress.new(run.objective))


def _verify_together(step_directory: Path) -> None:
    """Compare all files with their checksums, each on one rank. Raises `CheckpointError` on all ranks if any differs."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    digests = checksums.read_checksums(step_directory, paths.DAMAGED)
    mine = sorted(digests)[rank::world_size]
    faults = gathered(checksums.faults_of(step_directory, mine, digests))
    checksums.refuse(step_directory, [fault for part in faults for fault in part], paths.DAMAGED)


def _load(request: dict[str, Any], step_directory: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(request, str(step_directory))
    except (CheckpointException, CheckpointingException, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            found=f"{step_directory} cannot be read: {type(error).__name__}: {error}",
            required="a checkpoint of this model, whole",
            remedy="use another step, or copy the checkpoint again",
        ) from error


def _layout(config: Config) -> tuple[int, int]:
    return config.parallel.tensor, config.parallel.pipeline


def load_checkpoint(run: RunState, step_directory: Path) -> Progress:
    """Restore the whole run, in any layout; all ranks must call.

    Raises `CheckpointError` on every rank if a file is missing or damaged, or if the checkpoint is of another model.
    """
    saved = check_resumable(run.config, step_directory)
    _verify_together(step_directory)
    same_layout = _layout(saved) == _layout(run.config) and _saved_ranks(step_directory) == torch.distributed.get_world_size()
    request = whole_state(run, Progress.new(run.objective), is_loading=True, with_random_state=same_layout)
    return restore(run, _load(request, step_directory))


def _saved_ranks(step_directory: Path) -> int:
    """Ranks whose random state a checkpoint holds."""
    metadata = FileSystemReader(str(step_directory)).read_metadata()
    return sum(key.startswith("random_state/") for key in metadata.state_dict_metadata)


def _load_weights_of_checkpoint(run: RunState, step_directory: Path) -> None:
    if paths.must_be_verified(step_directory):
        _verify_together(step_directory)
    state = _load({"model": model_state(run)}, step_directory)
    run.load_model_state(state["model"])


def load_weights(run: RunState, path: str | Path) -> None:
    """Start a new run from the model weights of a checkpoint or a Hugging Face directory, and nothing else.

    Raises `CheckpointError` as `load_checkpoint` does. A checkpoint that holds weights alone (an import) may come without
    checksums; a run's own may not. A directory raises as `HFWeights`.
    """
    source = find_initial(path)
    check_weights(run.config, source)
    if source.is_hugging_face:
        load_directory(run.models, source.directory)
    else:
        _load_weights_of_checkpoint(run, source.directory)
    run.optimizer.reload_model_params()
