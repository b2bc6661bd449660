import re
from pathlib import Path

import pytest

from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.infra.checksums import write_checksums
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.training.checkpoints import paths


def _checkpoint(run: Path, step: int) -> Path:
    directory = run / paths.step_directory_name(step)
    directory.mkdir(parents=True)
    (directory / paths.METADATA_FILE).write_text("{}")
    (directory / paths.CONFIG_FILE).write_text("")
    return directory


def test_names_sort_as_steps_and_partial_ones_are_not_checkpoints() -> None:
    assert paths.step_directory_name(100) == "step_00000100"
    assert paths.step_of(Path("x/step_123456789")) == 123456789
    assert paths.step_of(Path(paths.partial_directory_name(7))) is None
    assert paths.step_of(Path("step_00000100.bak")) is None


def test_a_path_means_itself_or_the_newest_of_a_run(tmp_path: Path) -> None:
    first, second = _checkpoint(tmp_path, 10), _checkpoint(tmp_path, 20)
    write_atomically(tmp_path / "latest", f"{first.name}\n")
    assert paths.find_step_directory(second) == second
    assert paths.find_step_directory(tmp_path) == first
    assert paths.step_directories(tmp_path) == [first, second]


def test_the_checkpoints_of_a_run_are_found_below_the_folder_of_its_logs(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    step = _checkpoint(tmp_path / "checkpoints", 10)
    write_atomically(tmp_path / "checkpoints" / "latest", f"{step.name}\n")
    assert paths.find_step_directory(tmp_path) == step
    (step / paths.METADATA_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints/step_00000010 without metadata.json"):
        paths.find_step_directory(tmp_path)


def test_a_directory_without_its_last_file_does_not_count(tmp_path: Path) -> None:
    first, second = _checkpoint(tmp_path, 10), _checkpoint(tmp_path, 20)
    (second / paths.METADATA_FILE).unlink()
    assert paths.step_directories(tmp_path) == [first]
    with pytest.raises(CheckpointError, match=r"step_00000020 without metadata.json"):
        paths.find_step_directory(second)
    write_atomically(tmp_path / "latest", f"{second.name}\n")
    with pytest.raises(CheckpointError, match=r"step_00000020 without metadata.json"):
        paths.find_step_directory(tmp_path)


def test_nothing_to_find_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        paths.find_step_directory(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"neither metadata\.json nor latest"):
        paths.find_step_directory(tmp_path)
    assert paths.latest_directory(tmp_path) is None
    assert paths.step_directories(tmp_path / "absent") == []


def test_a_directory_near_a_checkpoint_is_refused_with_the_name_to_give(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "latest").write_text("step_00000001\n")
    with pytest.raises(CheckpointError, match=re.escape(f"name {tmp_path}/runs/first")):
        paths.find_step_directory(tmp_path / "runs")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"convert\.py import"):
        paths.find_step_directory(tmp_path / "export")


def test_a_runs_own_step_must_be_verified_and_a_bare_import_need_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, start = tmp_path / "step_00000010", tmp_path / "start"
    for folder in (step, start):
        folder.mkdir()
    assert paths.must_be_verified(step) and not paths.must_be_verified(start)
    write_checksums(start)
    assert paths.must_be_verified(start)
    monkeypatch.chdir(step)
    assert paths.must_be_verified(Path("."))
