"""A run that is stopped, in whatever phase and on whichever rank, goes on as if it had never stopped; also one whose batch grows,
where the rows that a step takes follow from the rows before it.

Level: bitwise, for the checkpoint of the last step (weights, Adam's moments, generator states, scheduler, counters) and for every
log line but its clock values; fp32 tolerance between layouts.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config, from_yaml
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


def test_settings_of_how_a_run_works_and_what_it_measures_have_their_effect_after_a_resume(
    corpus: tuple[str, str], tmp_path: Path, whole: dict[int, Config]
) -> None:
    """In the next steps, evaluations, lines and saves; and not in a bit of the last checkpoint."""
    config = _config(corpus, tmp_path, training={"eval_at_start": False})
    run_ranks(1, run_job, with_settings(config, training={"steps": 2}, optimizer={"decay_steps": 6}))
    changed = with_settings(
        config,
        model={"max_position_embeddings": 64, "family": "qwen3"},
        data={"valid": (corpus[1],), "prefetch_batches": 0, "cache_dir": str(tmp_path / "cache")},
        training={"eval_interval": 1, "eval_batches": 1, "eval_at_start": True},
        checkpoint={"interval": 1, "keep_last": 1, "keep_every": 4, "asynchronous": False},
        logging={"interval": 1, "dir": str(tmp_path / "elsewhere"), "peak_tflops": 1e-3},
    )
    run_ranks(1, run_job, changed)
    name, root = paths.step_directory_name, Path(config.checkpoint.dir)
    assert [path.name for path in paths.step_directories(root)] == [name(4), name(6)]
    assert_same_checkpoint(root / name(6), Path(whole[1].checkpoint.dir) / name(6))
    assert from_yaml(root / name(6) / paths.CONFIG_FILE) == changed
    records = read_metrics(tmp_path / "elsewhere" / METRICS_FILE)
    assert [(record["step"], "eval_loss" in record) for record in records] == [
        (step, is_evaluation) for step in (3, 4, 5, 6) for is_evaluation in (False, True)
    ]
    assert all(record["mfu"] > 0 for record in records if "loss" in record)
    assert any((tmp_path / "cache").iterdir())
    (last,) = (line["eval_loss"] for line in lines_of(whole[1]) if line["step"] == 6 and "eval_loss" in line)
    assert records[-1]["eval_loss"] != last, "another held-out corpus, and less of it"
    assert [line["step"] for line in lines_of(config)] == [2, 2], "the old log is left alone"


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


#: three increments, one every four rows: the steps begin at rows 0, 2, 4, 8, 14, 22 and 30
SIZES = [2, 2, 4, 6, 8, 8, 8]


def _growing(corpus: tuple[str, str], folder: Path, **sections: Any) -> Config:
    config = tiny_config(
        training={"steps": 7, "global_batch_size": 8, "rampup_batch_size": (2, 2, 12)},
        logging={"interval": 1, "progress": False},
    )
    config = with_settings(
        config,
        data={"train": (corpus[0],), "valid": (corpus[1],)},
        checkpoint={"dir": str(folder / "checkpoints"), "interval": 0, "keep_last": 0},
        logging={"dir": str(folder / "log")},
    )
    return with_settings(config, **sections)


def _done(config: Config, ranks: int) -> None:
    assert [ended for ended, _, _ in run_ranks(ranks, run_job, config)] == ["done"] * ranks


_GROWING_CASES = [
    pytest.param(2, {}, (3, 7), id="data"),
    pytest.param(1, {}, (2, 3, 4, 7), id="one", marks=pytest.mark.slow),
    pytest.param(2, {"pipeline": 2}, (2, 3, 4, 7), id="pipeline", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "parallel", "stops"), _GROWING_CASES)
def test_a_run_that_is_resumed_while_its_batch_grows_is_the_run_that_never_stopped(
    ranks: int, parallel: dict[str, int], stops: tuple[int, ...], corpus: tuple[str, str], tmp_path: Path
) -> None:
    whole = _growing(corpus, tmp_path / "whole", parallel=parallel)
    _done(whole, ranks)
    assert [line["global_batch_size"] for line in lines_of(whole) if "loss" in line] == SIZES
    resumed = _growing(corpus, tmp_path / "run", parallel=parallel)
    for steps in stops:
        _done(with_settings(resumed, training={"steps": steps}, optimizer={"decay_steps": 7}), ranks)
    name = "step_00000007"
    last = tmp_path / "whole" / "checkpoints" / name
    assert common_of(last)["progress"]["rows"] == sum(SIZES)
    assert_same_checkpoint(tmp_path / "run" / "checkpoints" / name, last)
    losses = [[line["loss"] for line in lines_of(config) if "loss" in line] for config in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 7


def test_ranks_share_growing_batches_of_the_same_rows(corpus: tuple[str, str], tmp_path: Path) -> None:
    found = []
    for ranks, micro in ((1, 1), (1, 2), (2, 1)):
        config = _growing(corpus, tmp_path / f"{ranks}-{micro}", training={"micro_batch_size": micro})
        _done(config, ranks)
        found.append([value for line in lines_of(config) for name, value in line.items() if name.endswith("loss")])
    assert len(found[0]) == 8, "seven steps and an evaluation"
    assert found[1] == pytest.approx(found[0], abs=2e-6)
    assert found[2] == pytest.approx(found[0], abs=2e-6)


def test_until_the_first_increment_the_run_is_that_of_a_small_batch_and_the_schedule_counts_steps(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    ramp = _growing(corpus, tmp_path / "ramp")
    small = _growing(corpus, tmp_path / "small", training={"global_batch_size": 2, "rampup_batch_size": ()})
    for config in (ramp, small):
        _done(config, 1)
    grown, constant = ([line for line in lines_of(config) if "loss" in line] for config in (ramp, small))
    assert [line["loss"] for line in grown[:2]] == [line["loss"] for line in constant[:2]]
    assert grown[2]["loss"] != constant[2]["loss"]
    assert [line["lr"] for line in grown] == [line["lr"] for line in constant]
    assert all("global_batch_size" not in line for line in constant)


def test_tokens_per_second_count_the_rows_of_each_step(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _growing(corpus, tmp_path, logging={"interval": 2}, training={"steps": 4})
    _done(config, 1)
    lines = [line for line in read_metrics(Path(config.logging.dir) / METRICS_FILE) if "tokens_per_s" in line]
    tokens = [line["tokens_per_s"] * line["step_time_s"] * 2 for line in lines]
    assert tokens == pytest.approx([(2 + 2) * 32, (4 + 6) * 32])
