"""A run that is stopped, in whatever phase and on whichever rank, goes on as if it had never stopped.

Level: bitwise, for the checkpoint of the last step (weights, Adam's moments, generator states, scheduler, counters) and for every
log line but its clock values.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.errors import CheckpointError, ConfigError
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.log import METRICS_FILE, read_metrics
from tests.support.checkpoints import assert_same_checkpoint, common_of
from tests.support.disks import small_disk
from tests.support.jobs import PHASES, lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings, write_corpus

pytestmark = pytest.mark.multiprocess


def _config(corpus: tuple[str, str], folder: Path, **sections: Any) -> Config:
    training = {"steps": 6, "eval_interval": 2, "eval_batches": 0, "eval_at_start": True}
    config = tiny_config(training=training, logging={"interval": 3, "progress": False})
    config = with_settings(
        config,
        data={"train": (corpus[0],), "valid": (corpus[0],)},
        checkpoint={"dir": str(folder / "checkpoints"), "interval": 0},
        logging={"dir": str(folder / "log")},
    )
    return with_settings(config, **sections)


@pytest.fixture(scope="module")
def whole(corpus: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Config]:
    """Configurations of runs that were never stopped, by number of ranks."""
    found = {}
    for ranks in (1, 2):
        config = _config(corpus, tmp_path_factory.mktemp(f"whole{ranks}"))
        assert [ended for ended, _, _ in run_ranks(ranks, run_job, config)] == ["done"] * ranks
        found[ranks] = config
    return found


def _assert_same_run(config: Config, whole: Config) -> None:
    """In every bit of the last checkpoint and, but for a baseline that was not asked for, in every line."""
    name = paths.step_directory_name(6)
    assert_same_checkpoint(Path(config.checkpoint.dir) / name, Path(whole.checkpoint.dir) / name)
    baseline, *others = lines_of(whole)
    assert lines_of(config) == [baseline] * config.training.eval_at_start + others
    assert "eval_loss" in baseline and [line["step"] for line in lines_of(whole)] == [0, 2, 3, 4, 6, 6]
    assert all(line["tokens_seen"] == line["step"] * 4 * 32 for line in lines_of(whole))
    assert all(line["epoch"] == pytest.approx(line["step"] * 4 / _rows_per_epoch(whole), rel=1e-12) for line in lines_of(whole))
    records = read_metrics(Path(config.logging.dir) / METRICS_FILE)
    for name in ("time", "elapsed_s"):
        assert [record[name] for record in records] == sorted(record[name] for record in records)
    assert time.time() - 3600 < records[0]["time"] <= records[-1]["time"] <= time.time()


def _rows_per_epoch(config: Config) -> int:
    rows: int = common_of(Path(config.checkpoint.dir) / paths.step_directory_name(6))["progress"]["corpus"][0]
    return rows


_DEFAULT = [("a step", (0, 1), signal.SIGTERM), ("evaluation", (1,), signal.SIGTERM), ("a save", (0,), signal.SIGUSR1)]
_ALL = [(phase, *who) for phase in PHASES for who in (((1,), signal.SIGTERM), ((0,), signal.SIGUSR1), ((0, 1), signal.SIGTERM))]
_MORE = [case for case in _ALL if case not in _DEFAULT]


@pytest.mark.parametrize(
    ("phase", "ranks", "number"), [*_DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in _MORE)]
)
def test_a_signal_in_any_phase_on_any_rank_saves_once_and_the_run_goes_on_bitwise(
    phase: str, ranks: tuple[int, ...], number: int, corpus: tuple[str, str], tmp_path: Path, whole: dict[int, Config]
) -> None:
    config = _config(corpus, tmp_path, checkpoint={"interval": 1 if phase == "a save" else 0, "keep_last": 0})
    stopped = run_ranks(2, run_job, config, phase, ranks, number)
    root = Path(config.checkpoint.dir)
    assert [bool(sent) for _, sent, _ in stopped] == [rank in ranks for rank in (0, 1)]
    saved = paths.latest_directory(root)
    assert saved is not None
    assert all(ended.endswith(f"saved {saved}") for ended, _, _ in stopped)
    step = common_of(saved)["progress"]["step"]
    assert step < 6
    if phase != "a save":
        assert paths.step_directories(root) == [saved]
    was_evaluated = any("eval_loss" in line for line in lines_of(config) if line["step"] == step)
    assert common_of(saved)["progress"]["evaluation_due"] == (step in (0, 2, 4) and not was_evaluated)
    assert phase != "evaluation" or not was_evaluated, "the evaluation ended before the signal could cut it short"
    assert [ended for ended, _, _ in run_ranks(2, run_job, config)] == ["done"] * 2
    _assert_same_run(config, whole[2])


def test_an_evaluation_that_was_caught_up_with_is_logged_once_though_the_run_dies_before_its_next_save(
    corpus: tuple[str, str], tmp_path: Path, whole: dict[int, Config]
) -> None:
    config = _config(corpus, tmp_path, training={"eval_at_start": False})
    ((_, sent, _),) = run_ranks(1, run_job, config, "evaluation", (0,))
    assert sent == ["evaluation"]
    saved = Path(config.checkpoint.dir) / paths.step_directory_name(2)
    assert common_of(saved)["progress"]["evaluation_due"]
    shutil.copytree(config.checkpoint.dir, tmp_path / "copy")
    for _ in range(2):  # runs whose evaluation is logged, and whose next checkpoint is lost, as when they are killed before it
        run_ranks(1, run_job, with_settings(config, training={"steps": 2}, optimizer={"decay_steps": 6}))
        assert [line["step"] for line in lines_of(config)] == [2]
        assert not common_of(saved)["progress"]["evaluation_due"]
        shutil.rmtree(config.checkpoint.dir)
        shutil.copytree(tmp_path / "copy", config.checkpoint.dir)
    run_ranks(1, run_job, config)
    _assert_same_run(config, whole[1])


@pytest.mark.slow
def test_runs_cut_at_every_step_log_as_one(corpus: tuple[str, str], tmp_path: Path, whole: dict[int, Config]) -> None:
    config = _config(corpus, tmp_path, checkpoint={"asynchronous": False})
    for _ in range(8):  # the last evaluation may be cut off too
        ended, _, _ = run_ranks(1, run_job, config, "a step", (0,))[0]
        if ended == "done":
            break
    assert ended == "done"
    steps = paths.step_directories(Path(config.checkpoint.dir))
    assert len(steps) == 3, "kept: the last three of six"
    _assert_same_run(config, whole[1])


def test_other_corpora_are_refused_before_the_next_step(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, training={"steps": 2}, optimizer={"decay_steps": 6})
    run_ranks(1, run_job, config)
    other = write_corpus(tmp_path / "other", num_documents=40)
    changed = with_settings(config, data={"train": (other,)}, training={"steps": 4})
    with pytest.raises(AssertionError, match="required: the same corpora") as caught:
        run_ranks(1, run_job, changed)
    assert CheckpointError.__name__ in str(caught.value)
    assert paths.step_directories(Path(config.checkpoint.dir))[-1].name == paths.step_directory_name(2)


def test_a_new_run_among_the_checkpoints_of_another_is_refused(corpus: tuple[str, str], tmp_path: Path) -> None:
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron_dmtd.training.start import resume_directory

    config = _config(corpus, tmp_path, training={"steps": 2}, optimizer={"decay_steps": 6}, checkpoint={"resume": False})
    assert resume_directory(config) is None
    run_ranks(1, run_job, config)
    with pytest.raises(ConfigError, match=r"checkpoint.resume is false"):
        resume_directory(config)
    (Path(config.checkpoint.dir) / paths.LATEST_FILE).unlink()
    with pytest.raises(ConfigError, match="no `latest` file"):
        resume_directory(with_settings(config, checkpoint={"resume": True}))
    assert resume_directory(with_settings(config, checkpoint={"dir": ""})) is None


def test_a_log_that_rank_0_refuses_is_refused_on_every_rank(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path)
    folder = Path(config.logging.dir)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("not a log\n")
    with pytest.raises(AssertionError, match=r"found: rank 0: .*metrics.jsonl, line 1"):
        run_ranks(2, run_job, config)
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match=r"found: rank 0: .*Not a directory"):
        run_ranks(2, run_job, with_settings(config, logging={"dir": str(tmp_path / "file" / "log")}))


def test_a_full_disk_under_the_log_stops_the_run_after_a_save_and_no_line_is_lost(
    corpus: tuple[str, str], tmp_path: Path, whole: dict[int, Config]
) -> None:
    with small_disk(tmp_path / "small", "size=8k") as folder:
        (folder / "other").write_bytes(bytes(4096))  # the owner's line takes the rest
        config = _config(corpus, tmp_path, logging={"dir": str(folder)})
        with pytest.raises(AssertionError, match=r"the log cannot be written: metrics.jsonl: No space left on device") as caught:
            run_ranks(2, run_job, config)
        saved = Path(config.checkpoint.dir) / paths.step_directory_name(0)
        assert f"saved {saved}; 1 lines wait in the checkpoint" in str(caught.value)
        assert paths.latest_directory(Path(config.checkpoint.dir)) == saved
        (folder / "other").unlink()
        assert [ended for ended, _, _ in run_ranks(2, run_job, config)] == ["done"] * 2
        _assert_same_run(config, whole[2])
