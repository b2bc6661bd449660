"""A checkpoint is seen when it is complete and not before; whatever fails, on whichever rank, the last complete one stands."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.infra import checksums
from megatron_dmtd.platform import prepare_megatron
from megatron_dmtd.training.checkpoints import paths
from tests.support.checkpoints import PATIENCE_S, assert_same_checkpoint, common_of
from tests.support.disks import small_disk
from tests.support.jobs import lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

pytestmark = pytest.mark.multiprocess


def _config(corpus: tuple[str, str], folder: Path | str, **sections: Any) -> Config:
    config = with_settings(tiny_config(), data={"train": (corpus[0],)}, checkpoint={"dir": str(folder)})
    return with_settings(config, **sections)


def _started(config: Config) -> tuple[Any, Any, Any, Any]:
    """A run, its batches, its saver and new progress."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.checkpoints.saving import Saver
    from megatron_dmtd.training.progress import Progress

    run = start.prepare(config, prepare_megatron())
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=run.rows)
    return run, iterator, Saver(run, config.checkpoint.dir), Progress.new(run.objective)


def _save_in_both_ways(config: Config, other: str) -> tuple[bool, bool, list[str]]:
    from megatron_dmtd.training.checkpoints.saving import Saver
    from megatron_dmtd.training.step import train_step

    run, iterator, saver, progress = _started(config)
    for _ in range(2):
        train_step(run, iterator)
    Saver(run, other).save(progress)
    saver.start(progress)
    hidden = [path.name for path in Path(config.checkpoint.dir).iterdir()] if torch.distributed.get_rank() == 0 else []
    was_active = saver.is_active and len(saver._running.host_copy) > 0  # held: of a GPU, its memory would be used again
    for _ in range(3):
        train_step(run, iterator)  # weights and moments change while the writer writes them
    final = saver.finish()
    return was_active, final == Path(config.checkpoint.dir) / "step_00000002" and not saver.is_active, hidden


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [pytest.param(1, {}, marks=pytest.mark.slow), (2, {}), (2, {"pipeline": 2})],
    ids=["one", "data", "pipeline"],
)
def test_what_is_written_while_training_goes_on_is_the_state_at_the_start(
    ranks: int, parallel: dict[str, Any], corpus: tuple[str, str], tmp_path: Path
) -> None:
    config = _config(corpus, tmp_path / "background", parallel=parallel)
    results = run_ranks(ranks, _save_in_both_ways, config, str(tmp_path / "waited"))
    assert all(was_active and is_done for was_active, is_done, _ in results)
    (name,) = results[0][2]
    assert name.startswith(".partial-step_00000002-"), "invisible until it was complete"
    assert_same_checkpoint(tmp_path / "background" / "step_00000002", tmp_path / "waited" / "step_00000002")
    checksums.verify(tmp_path / "background" / "step_00000002", paths.DAMAGED)


def _save_at_each_step(config: Config, steps: int) -> list[str]:
    from megatron_dmtd.training.step import train_step

    run, iterator, saver, progress = _started(config)
    seen = []
    for _ in range(steps):
        train_step(run, iterator)
        saver.start(progress)
        latest = Path(config.checkpoint.dir) / paths.LATEST_FILE
        seen.append(latest.read_text().strip() if latest.exists() else "")
    assert saver.finish() is not None
    assert saver.finish() is None
    return seen


def test_the_next_save_waits_for_the_last_and_old_ones_go_but_for_every_nth(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, checkpoint={"keep_last": 2, "keep_every": 3})
    assert run_ranks(1, _save_at_each_step, config, 1) == [[""]]
    later = tmp_path / paths.step_directory_name(9)
    later.mkdir()
    (later / paths.METADATA_FILE).write_text("of a run that was set back")
    (tmp_path / ".partial-step_00000002-orphan").mkdir()
    (tmp_path / ".removed-step_00000001-orphan").mkdir()
    (tmp_path / ".latest.1.tmp").write_text("")
    (seen,) = run_ranks(1, _save_at_each_step, config, 5)
    assert seen == [paths.step_directory_name(step) for step in range(1, 6)]
    left = ["latest", *(paths.step_directory_name(step) for step in (3, 5, 6, 9))]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert (tmp_path / "latest").read_text() == "step_00000006\n"


def _resume_from_nothing(config: Config) -> int:
    from megatron_dmtd.training.step import train_step

    run, iterator, saver, progress = _started(config)
    if run.step == 0 and paths.latest_directory(Path(config.checkpoint.dir)) is None:
        saver.save(progress)
        return 0
    train_step(run, iterator)
    saver.save(progress)
    return int(run.step)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (True, "bf16"),
        (False, "fp32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, "fp32"), (False, "bf16"))),
    ],
)
def test_a_run_without_a_step_can_be_saved_and_resumed(
    optimizer: bool, precision: str, corpus: tuple[str, str], tmp_path: Path
) -> None:
    sections = {"parallel": {"distributed_optimizer": optimizer}, "training": {"precision": precision}}
    config = _config(corpus, tmp_path / "saved", **sections)
    assert [run_ranks(1, _resume_from_nothing, config)[0] for _ in range(2)] == [0, 1]
    run_ranks(1, _save_at_each_step, _config(corpus, tmp_path / "whole", **sections), 1)
    assert_same_checkpoint(tmp_path / "saved" / "step_00000001", tmp_path / "whole" / "step_00000001")


def _kill_the_writer(config: Config) -> str:
    from megatron_dmtd.training.checkpoints.saving import SaveError
    from megatron_dmtd.training.step import train_step

    run, iterator, saver, progress = _started(config)
    train_step(run, iterator)
    saver.save(progress)
    train_step(run, iterator)
    saver.start(progress)
    if torch.distributed.get_rank() == 1:
        os.kill(saver._running.process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(saver._running.process.pid, signal.SIGKILL)
    try:
        saver.finish()
    except SaveError as error:
        return str(error)
    return "saved"


def test_a_writer_killed_on_one_rank_is_an_error_on_all_and_leaves_the_last_checkpoint(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    config = _config(corpus, tmp_path, parallel={"pipeline": 2})
    errors = run_ranks(2, _kill_the_writer, config)
    assert errors[0] == errors[1]
    assert "rank 1: the writing process ended with status -9" in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
    checksums.verify(tmp_path / "step_00000001", paths.DAMAGED)


def _save_until_it_fails(config: Config, most: int) -> tuple[int, str]:
    from megatron_dmtd.training.checkpoints.saving import SaveError
    from megatron_dmtd.training.step import train_step

    run, iterator, saver, progress = _started(config)
    for _ in range(most):
        train_step(run, iterator)
        try:
            saver.save(progress)
        except SaveError as error:
            return int(run.step), str(error)
    return int(run.step), "never failed"


@pytest.mark.parametrize(
    "kib", [1750, *(pytest.param(kib, marks=pytest.mark.slow) for kib in (1300, 1850))], ids=lambda kib: f"{kib}KiB"
)
def test_a_disk_that_fills_up_leaves_the_last_checkpoint_and_says_so_on_every_rank(
    kib: int, corpus: tuple[str, str], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", f"size={kib}k") as folder:
        config = _config(corpus, folder / "run", checkpoint={"keep_last": 0})
        results = run_ranks(2, _save_until_it_fails, config, 6)
        assert results[0] == results[1]
        failed, error = results[0]
        assert failed >= 2, "one checkpoint fits"
        assert "No space left on device" in error or "errno: 28" in error or "failed" in error, error
        last = paths.latest_directory(folder / "run")
        assert last is not None
        assert last.name == paths.step_directory_name(failed - 1)
        checksums.verify(last, paths.DAMAGED)
        assert not [path.name for path in (folder / "run").iterdir() if path.name.startswith(".")], "the half of it is gone"
        # With room again the run goes on from there, bitwise.
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        run_ranks(2, _save_until_it_fails, config, 1)
        run_ranks(2, _save_until_it_fails, _config(corpus, tmp_path / "whole", checkpoint={"keep_last": 0}), failed)
        assert_same_checkpoint(
            folder / "run" / paths.step_directory_name(failed), tmp_path / "whole" / paths.step_directory_name(failed)
        )


def test_a_folder_that_cannot_be_written_to_is_refused_on_every_rank(corpus: tuple[str, str], tmp_path: Path) -> None:
    with small_disk(tmp_path / "readonly", "ro") as folder:
        results = run_ranks(2, _save_until_it_fails, _config(corpus, folder / "run"), 2)
        assert results[0] == results[1]
        assert results[0][0] == 1
        assert "Read-only file system" in results[0][1]


def _save_twice_at_one_step(config: Config) -> list[float]:
    _, _, saver, progress = _started(config)
    saver.save(progress)
    progress.bad_steps = 7
    saver.save(progress)
    return [saver.blocking_s]


def test_saving_a_step_again_replaces_its_checkpoint(corpus: tuple[str, str], tmp_path: Path) -> None:
    ((blocking_s,),) = run_ranks(1, _save_twice_at_one_step, _config(corpus, tmp_path))
    assert blocking_s > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000000"]
    assert common_of(tmp_path / "step_00000000")["progress"]["bad_steps"] == 7


def _abandon(config: Config) -> bool:
    from megatron_dmtd.training.step import train_step

    run, iterator, saver, progress = _started(config)
    train_step(run, iterator)
    saver.start(progress)
    process = saver._running.process
    saver.abandon()
    return process.exitcode is not None and not saver.is_active


def test_a_save_that_a_failing_run_abandons_is_never_named(corpus: tuple[str, str], tmp_path: Path) -> None:
    assert run_ranks(1, _abandon, _config(corpus, tmp_path)) == [True]
    assert paths.latest_directory(tmp_path) is None
    assert paths.step_directories(tmp_path) == []


KILLS = 30


def _config_to_kill(corpus: tuple[str, str], folder: Path) -> Config:
    """A model of 2.6 million numbers, so that a save takes a while, saved after every step."""
    shape = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 32}
    return with_settings(
        tiny_config(model=shape, training={"steps": 1000, "eval_interval": 2}, optimizer={"decay_steps": 100}),
        data={"train": (corpus[0],), "valid": (corpus[1],)},
        checkpoint={"dir": str(folder / "checkpoints"), "interval": 1, "keep_last": 2},
        logging={"dir": str(folder / "log")},
    )


def _alone(config: Config) -> None:
    os.setsid()
    os.environ["RANK"] = "0"
    run_job(config)


def _saves_under_way(root: Path, *, later_than: int) -> list[str]:
    names = [path.name for path in root.glob(".partial-step_*")]
    return [name for name in names if int(name.split("-step_")[1].split("-")[0]) > later_than]


def _start_and_kill_in_a_save(config: Config, *, later_than: int, delay_s: float) -> bool:
    """Start the run, wait for the save of a later step, kill the process `delay_s` later. Whether a save was in progress then."""
    root = Path(config.checkpoint.dir)
    process: Any = multiprocessing.get_context("fork").Process(target=_alone, args=(config,))
    process.start()
    deadline = time.monotonic() + PATIENCE_S
    while not _saves_under_way(root, later_than=later_than):
        assert process.is_alive() and time.monotonic() < deadline, "no save began"
        time.sleep(0.002)
    time.sleep(delay_s)
    was_saving = bool(_saves_under_way(root, later_than=later_than))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return was_saving


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_at_random_moments_of_a_save_lose_nothing(corpus: tuple[str, str], tmp_path: Path) -> None:
    prepare_megatron()
    generator, config = random.Random(0), _config_to_kill(corpus, tmp_path / "killed")
    root = Path(config.checkpoint.dir)
    reached, in_save = -1, 0
    for _ in range(KILLS):
        # The first save after the start, the second or the third: the later ones only begin when those before are complete.
        later_than, delay_s = reached + generator.randrange(3), generator.uniform(0.0, 0.5)
        in_save += _start_and_kill_in_a_save(config, later_than=later_than, delay_s=delay_s)
        for directory in paths.step_directories(root):
            checksums.verify(directory, paths.DAMAGED)
        if (newest := paths.latest_directory(root)) is not None:
            step = common_of(newest)["progress"]["step"]
            assert step >= reached, "a kill never takes a checkpoint back"
            reached = step
    assert in_save >= KILLS // 2, f"only {in_save} of {KILLS} kills fell into a save"
    assert reached > 0
    last = {"training": {"steps": reached + 3}}
    config = with_settings(config, **last)
    whole = with_settings(_config_to_kill(corpus, tmp_path / "whole"), **last)
    for one in (config, whole):
        assert run_ranks(1, run_job, one)[0][0] == "done"
    name = paths.step_directory_name(reached + 3)
    assert_same_checkpoint(root / name, Path(whole.checkpoint.dir) / name)
    assert lines_of(config) == lines_of(whole)
    assert [line["step"] for line in lines_of(whole) if "lr" in line] == list(range(1, reached + 4))
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")], "what the kills left half-written is gone"
    print(f"{KILLS} kills, {in_save} in a save; the run reached step {reached} under them")
