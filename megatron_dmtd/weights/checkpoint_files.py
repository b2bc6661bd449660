"""Names inside a checkpoint's step directory, besides those of the `torch_dist` format. No torch."""

from __future__ import annotations

from pathlib import Path

from megatron_dmtd.config import Config, from_yaml
from megatron_dmtd.errors import CheckpointError, ConfigError

#: the whole configuration of the run
CONFIG_FILE = "config.yaml"
#: Megatron writes this file last
METADATA_FILE = "metadata.json"
#: the tokenizer of a model that was imported from one file, and has no other home
TOKENIZER_FOLDER = "tokenizer"


def saved_config(step_directory: str | Path) -> Config:
    """The configuration saved with a checkpoint. Raises `CheckpointError` if it is absent or not of this version."""
    path = Path(step_directory) / CONFIG_FILE
    try:
        return from_yaml(path)
    except ConfigError as error:
        raise CheckpointError(
            found=f"{path}: {error.found}", required="the configuration saved with the checkpoint", remedy=error.remedy
        ) from error
