from pathlib import Path

import pytest

from megatron_dmtd.config import to_yaml
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.weights.checkpoint_files import CONFIG_FILE, saved_config
from tests.support.tiny import tiny_config


def test_a_configuration_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    config = tiny_config(training={"steps": 7})
    (tmp_path / CONFIG_FILE).write_text(to_yaml(config))
    assert saved_config(tmp_path) == config == saved_config(str(tmp_path))


def test_an_unreadable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.yaml: no file"):
        saved_config(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("model: {no_such_field: 1}\n")
    with pytest.raises(CheckpointError, match=r"unknown setting model.no_such_field"):
        saved_config(tmp_path)
