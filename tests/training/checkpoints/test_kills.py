"""Thirty kills with SIGKILL at random moments of background saves, one run: nothing is lost, and the run stays the same run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.infra import checksums
from megatron_dmtd.platform import prepare_megatron
from megatron_dmtd.training.checkpoints import paths
from tests.support.checkpoints import PATIENCE_S, assert_same_checkpoint, common_of
from tests.support.jobs import lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

KILLS = 30


def _config(corpus: tuple[str, str], folder: Path) -> Config:
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
    """Start the run, wait for the save of a later step, kill the process `delay_s` later. Whether a save was under way then."""
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
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_thirty_kills_at_random_moments_of_a_save_lose_nothing(corpus: tuple[str, str], tmp_path: Path) -> None:
    prepare_megatron()
    generator, config = random.Random(0), _config(corpus, tmp_path / "killed")
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
    whole = with_settings(_config(corpus, tmp_path / "whole"), **last)
    for one in (config, whole):
        assert run_ranks(1, run_job, one)[0][0] == "done"
    name = paths.step_directory_name(reached + 3)
    assert_same_checkpoint(root / name, Path(whole.checkpoint.dir) / name)
    assert lines_of(config) == lines_of(whole)
    assert [line["step"] for line in lines_of(whole) if "lr" in line] == list(range(1, reached + 4))
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")], "what the kills left half-written is gone"
    print(f"{KILLS} kills, {in_save} in a save; the run reached step {reached} under them")
