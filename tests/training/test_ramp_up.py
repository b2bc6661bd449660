"""Training with a batch that grows: which rows a step takes follows from the rows before it, through resumes and on any ranks.

Level: bitwise for the same layout, fp32 tolerance for another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.training.log import METRICS_FILE, read_metrics
from tests.support.checkpoints import assert_same_checkpoint, common_of
from tests.support.jobs import lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

pytestmark = pytest.mark.multiprocess

#: three increments, one every four rows: the steps begin at rows 0, 2, 4, 8, 14, 22 and 30
SIZES = [2, 2, 4, 6, 8, 8, 8]


def _config(corpus: tuple[str, str], folder: Path, **sections: Any) -> Config:
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


_CASES = [
    pytest.param(2, {}, (3, 7), id="data"),
    pytest.param(1, {}, (2, 3, 4, 7), id="one", marks=pytest.mark.slow),
    pytest.param(2, {"pipeline": 2}, (2, 3, 4, 7), id="pipeline", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "parallel", "stops"), _CASES)
def test_a_run_that_is_resumed_while_its_batch_grows_is_the_run_that_never_stopped(
    ranks: int, parallel: dict[str, int], stops: tuple[int, ...], corpus: tuple[str, str], tmp_path: Path
) -> None:
    whole = _config(corpus, tmp_path / "whole", parallel=parallel)
    _done(whole, ranks)
    assert [line["global_batch_size"] for line in lines_of(whole) if "loss" in line] == SIZES
    resumed = _config(corpus, tmp_path / "run", parallel=parallel)
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
        config = _config(corpus, tmp_path / f"{ranks}-{micro}", training={"micro_batch_size": micro})
        _done(config, ranks)
        found.append([value for line in lines_of(config) for name, value in line.items() if name.endswith("loss")])
    assert len(found[0]) == 8, "seven steps and an evaluation"
    assert found[1] == pytest.approx(found[0], abs=2e-6)
    assert found[2] == pytest.approx(found[0], abs=2e-6)


def test_until_the_first_increment_the_run_is_that_of_a_small_batch_and_the_schedule_counts_steps(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    ramp = _config(corpus, tmp_path / "ramp")
    small = _config(corpus, tmp_path / "small", training={"global_batch_size": 2, "rampup_batch_size": ()})
    for config in (ramp, small):
        _done(config, 1)
    grown, constant = ([line for line in lines_of(config) if "loss" in line] for config in (ramp, small))
    assert [line["loss"] for line in grown[:2]] == [line["loss"] for line in constant[:2]]
    assert grown[2]["loss"] != constant[2]["loss"]
    assert [line["lr"] for line in grown] == [line["lr"] for line in constant]
    assert all("global_batch_size" not in line for line in constant)


def test_tokens_per_second_count_the_rows_of_each_step(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, logging={"interval": 2}, training={"steps": 4})
    _done(config, 1)
    lines = [line for line in read_metrics(Path(config.logging.dir) / METRICS_FILE) if "tokens_per_s" in line]
    tokens = [line["tokens_per_s"] * line["step_time_s"] * 2 for line in lines]
    assert tokens == pytest.approx([(2 + 2) * 32, (4 + 6) * 32])
