"""Check before submission that a training job's inputs exist and that it has steps left to make. No torch."""

from __future__ import annotations

from pathlib import Path

from megatron_dmtd.config import Config
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.training.checkpoints.initial import find_initial
from megatron_dmtd.training.checkpoints.paths import latest_directory, step_of


def check_training(config: Config, *, inputs_come_later: bool) -> None:
    """Refuse a finished run, and one whose corpora, tokenizer or initial weights are missing. Call it in the work folder.

    With `inputs_come_later`, other jobs create the inputs first, so they are not looked for.
    """
    newest = latest_directory(Path(config.checkpoint.dir)) if config.checkpoint.dir and config.checkpoint.resume else None
    steps, done = config.training.steps, step_of(newest) if newest is not None else None
    if done is not None and done >= steps:
        raise ConfigError(
            found=f"{newest}: the run has made {done} of {steps} steps, so nothing is left to do",
            required="a run with steps to make",
            remedy="raise training.steps, or name other folders with checkpoint.dir and logging.dir",
        )
    if inputs_come_later:
        return
    for prefix in (*config.data.train, *config.data.valid):
        TokenFile(prefix)
    if config.data.tokenizer and not Path(config.data.tokenizer).is_dir():
        raise DataError(
            found=f"no directory {config.data.tokenizer} (data.tokenizer)",
            required="the tokenizer that made the corpora",
            remedy="correct data.tokenizer",
        )
    if newest is None and config.checkpoint.init_from:
        find_initial(config.checkpoint.init_from)
