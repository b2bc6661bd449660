"""What a training job needs before it waits in a queue. `tests/tools/test_launch.py` has the same through the command."""

import dataclasses

import pytest

from megatron_dmtd.config import CheckpointConfig, Config, DataConfig, TrainingConfig
from megatron_dmtd.errors import CheckpointError, ConfigError, DataError
from megatron_dmtd.launch.inputs import check_training
from tests.support.tiny import write_corpus


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run whose corpus and tokenizer are in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus", num_documents=3)
    (tmp_path / "tokenizer").mkdir()
    return Config(
        data=DataConfig(train=("corpus",), tokenizer="tokenizer"),
        training=TrainingConfig(steps=10),
        checkpoint=CheckpointConfig(dir="run"),
    )


def make_checkpoint(folder, step: int) -> None:
    directory = folder / f"step_{step:08d}"
    directory.mkdir(parents=True)
    for name in ("metadata.json", "config.yaml"):
        (directory / name).touch()
    (folder / "latest").write_text(directory.name)


def with_data(config: Config, **values) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **values))


def test_a_run_with_its_inputs_may_start(config):
    check_training(config, inputs_come_later=False)


def test_missing_inputs_are_refused_unless_they_come_later(config):
    from_weights = dataclasses.replace(config, checkpoint=CheckpointConfig(dir="run", init_from="start"))
    for broken, error in (
        (with_data(config, train=("nope",)), DataError),
        (with_data(config, valid=("nope",)), DataError),
        (with_data(config, tokenizer="nope"), DataError),
        (from_weights, CheckpointError),
    ):
        with pytest.raises(error):
            check_training(broken, inputs_come_later=False)
        check_training(broken, inputs_come_later=True)


def test_a_finished_run_is_refused_and_a_started_one_needs_no_initial_weights(config, tmp_path):
    make_checkpoint(tmp_path / "run", 9)
    resumed = dataclasses.replace(config, checkpoint=CheckpointConfig(dir="run", init_from="gone"))
    check_training(resumed, inputs_come_later=False)
    make_checkpoint(tmp_path / "run", 10)
    for later in (False, True):
        with pytest.raises(ConfigError, match="10 of 10 steps, so nothing is left to do"):
            check_training(resumed, inputs_come_later=later)
