import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.errors import CheckpointError, ConfigError, DataError, DMTDError
from megatron_dmtd.training.checkpoints.run_lock import LOCK_FILE, locked
from megatron_dmtd.training.health.watchdog import Watchdog
from megatron_dmtd.training.rows import Sources
from megatron_dmtd.training.start import check, locked_folders, resume_directory
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings


def checkpoint(run: Path, step: int, *, is_latest: bool) -> Path:
    directory = run / f"step_{step:08d}"
    directory.mkdir(parents=True)
    for name in ("metadata.json", "config.yaml"):
        (directory / name).touch()
    if is_latest:
        (run / "latest").write_text(directory.name + "\n")
    return directory


def config_in(run: Path, **checkpoint: Any) -> Config:
    return tiny_config(checkpoint={"dir": str(run)} | checkpoint)


def test_a_run_goes_on_from_the_checkpoint_that_latest_names(tmp_path):
    assert resume_directory(tiny_config()) is None, "nothing is saved"
    assert resume_directory(config_in(tmp_path / "absent")) is None
    first = checkpoint(tmp_path, 10, is_latest=True)
    checkpoint(tmp_path, 20, is_latest=False)
    assert resume_directory(config_in(tmp_path)) == first
    assert resume_directory(config_in(tmp_path / "other", resume=False)) is None


@pytest.mark.parametrize(("resume", "found"), [(True, "no `latest` file"), (False, "checkpoint.resume is false")])
def test_a_new_run_never_writes_among_the_checkpoints_of_another(tmp_path, resume, found):
    checkpoint(tmp_path, 10, is_latest=False)
    with pytest.raises(ConfigError, match=found):
        resume_directory(config_in(tmp_path, resume=resume))


def test_a_latest_that_names_an_incomplete_checkpoint_is_refused(tmp_path):
    (checkpoint(tmp_path, 10, is_latest=True) / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"without metadata\.json"):
        resume_directory(config_in(tmp_path))


def nothing(_: Config) -> Sources:
    raise DataError(found="no rows", required="some", remedy="name a corpus")


def test_refusals_come_from_settings_before_rows_and_rows_before_checkpoints(tmp_path):
    wrong = dataclasses.replace(tiny_config(), training=dataclasses.replace(tiny_config().training, steps=-1))
    with pytest.raises(ConfigError, match=r"training\.steps"):
        check(wrong, world_size=1, open_sources=nothing)
    checkpoint(tmp_path, 10, is_latest=False)
    with pytest.raises(DataError, match="no rows"):
        check(config_in(tmp_path), world_size=1, open_sources=nothing)

    def some(_: Config) -> Sources:
        return Sources(train=None, valid=None)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="no `latest` file"):
        check(config_in(tmp_path), world_size=1, open_sources=some)
    with pytest.raises(CheckpointError, match="no directory"):
        check(config_in(tmp_path / "new", init_from=str(tmp_path / "absent")), world_size=1, open_sources=some)


def _hold(config: Config) -> tuple[str, list[bool]]:
    folders = [Path(config.checkpoint.dir), Path(config.logging.dir)]
    try:
        with locked_folders(config, Watchdog(limit_s=0, rank=0, world_size=1)):
            return "", [(folder / LOCK_FILE).read_bytes() != b"" for folder in folders]
    except DMTDError as error:
        return error.found, []


@pytest.mark.multiprocess
def test_all_ranks_learn_that_another_job_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dmtd.training.checkpoints.run_lock._LINGER_S", 0.3)
    config = with_settings(config_in(tmp_path / "run"), logging={"dir": str(tmp_path / "log")})
    found = run_ranks(2, _hold, config)
    assert [words for words, _ in found] == ["", ""] and found[0][1] == [True, True]
    with locked(tmp_path / "log"):
        refused = run_ranks(2, _hold, config)
    assert all(words.startswith(f"rank 0: {tmp_path / 'log'} is in use by process") for words, _ in refused)
    assert run_ranks(1, _hold, config)[0][0] == "", "the other folder was given up"
