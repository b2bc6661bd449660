"""From a configuration to a run that is ready for its next step: refusals, process groups, locks, model, checkpoint.

Everything that may refuse is here, as early as it can: `check` before any process group or weight exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_dmtd.config import Config, validate
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.data.corpora.tokenizer import check_mask
from megatron_dmtd.errors import ConfigError, DMTDError
from megatron_dmtd.parallel.groups import init_parallel, rank_of_environment
from megatron_dmtd.platform import Platform
from megatron_dmtd.platform.products import keep_choices_in
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.checkpoint import load_checkpoint, load_weights
from megatron_dmtd.training.checkpoints.compatibility import check_resumable, check_weights
from megatron_dmtd.training.checkpoints.initial import find_initial
from megatron_dmtd.training.checkpoints.run_lock import LEASE_S, locked
from megatron_dmtd.training.health.consensus import raise_together
from megatron_dmtd.training.health.watchdog import Watchdog
from megatron_dmtd.training.objectives import make_objective
from megatron_dmtd.training.progress import Progress
from megatron_dmtd.training.rows import OpenSources, open_corpora
from megatron_dmtd.training.setup import build_run
from megatron_dmtd.training.state import RunState
from megatron_dmtd.weights.hf_directory import HFWeights

#: Next to a run's checkpoints: which library multiplies, by machine (`platform.choices`).
PRODUCTS_FOLDER = "products"


def resume_directory(config: Config) -> Path | None:
    """The checkpoint from which a run with this configuration resumes; None for a new run.

    Raises `CheckpointError` if `latest` names an incomplete one, `ConfigError` if a new run would write into another's folder.
    """
    if not config.checkpoint.dir:
        return None
    root = Path(config.checkpoint.dir)
    if config.checkpoint.resume:
        latest = paths.latest_directory(root)
        if latest is not None or not paths.step_directories(root):
            return latest
    elif not paths.step_directories(root):
        return None
    raise ConfigError(
        found=f"{root} holds the checkpoints of a run, "
        + ("and no `latest` file" if config.checkpoint.resume else "checkpoint.resume is false"),
        required="a folder without checkpoints for a new run, or one whose `latest` names the checkpoint to go on from",
        remedy="choose another checkpoint.dir, or set checkpoint.resume and write the name of a checkpoint into `latest`",
    )


def check(config: Config, *, world_size: int, open_sources: OpenSources = open_corpora) -> None:
    """Refuse, before any process group or weight exists, whatever cannot run: settings, rows, checkpoints."""
    validate(config, world_size=world_size)
    make_objective(config)
    open_sources(config)
    if config.data.tokenizer and not config.cycle.is_vanilla:
        check_mask(config.data.tokenizer, config.cycle.mask_token_id)
    if (directory := resume_directory(config)) is not None:
        check_resumable(config, directory)
    elif config.checkpoint.init_from:
        _check_initial(config)


def _check_initial(config: Config) -> None:
    """Refuse weights that are not those of this model; of a Hugging Face directory, tensor by tensor."""
    source = find_initial(config.checkpoint.init_from)
    check_weights(config, source)
    if source.is_hugging_face:
        HFWeights(source.directory, decoder_of(config.model))


def prepare(config: Config, platform: Platform) -> RunState:
    """A run ready for its next step: built, and restored from its newest checkpoint or from `init_from`."""
    watchdog = Watchdog(limit_s=0, rank=0, world_size=1)
    join(config, platform, watchdog)
    return build(config, platform, watchdog)[0]


def _beat(config: Config, watchdog: Watchdog, phase: str) -> None:
    # How long this takes depends on how much has to be read; collectives have their own limit.
    watchdog.beat(phase, step=0, allowed_s=config.parallel.timeout_s)


def join(config: Config, platform: Platform, watchdog: Watchdog) -> None:
    """Start the process groups of the run."""
    _beat(config, watchdog, "joining the other ranks")
    init_parallel(config, platform)
    watchdog.connect()


@contextlib.contextmanager
def locked_folders(config: Config, watchdog: Watchdog) -> Iterator[None]:
    """Rank 0 holds the run's folders. Raises on every rank, before anything in them is touched, if another job has one."""
    _beat(config, watchdog, "locking the run's folders")
    folders = {Path(folder).absolute() for folder in (config.checkpoint.dir, config.logging.dir) if folder}
    error = None
    with contextlib.ExitStack() as held:
        try:
            for folder in sorted(folders) if rank_of_environment() == 0 else []:
                held.enter_context(locked(folder, lease_s=min(LEASE_S, config.parallel.timeout_s / 2)))
        except DMTDError as refused:
            error = refused
        raise_together(error)
        yield


def build(config: Config, platform: Platform, watchdog: Watchdog) -> tuple[RunState, Progress]:
    """The run's state and progress, new, or restored from its newest checkpoint, or with the weights of `init_from`."""
    _beat(config, watchdog, "building the model")
    keep_choices_in(Path(config.checkpoint.dir) / PRODUCTS_FOLDER if config.checkpoint.dir else None)
    run = build_run(config, platform)
    progress = Progress.new(run.objective, device=platform.device)
    _beat(config, watchdog, "loading a checkpoint")
    if (directory := resume_directory(config)) is not None:
        progress = load_checkpoint(run, directory)
    elif config.checkpoint.init_from:
        load_weights(run, config.checkpoint.init_from)
    return run, progress
