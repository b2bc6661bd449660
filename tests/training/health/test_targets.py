"""Steps without targets: announced, counted over resumes, and kept out of what spikes are measured against."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dmtd.config import Config, OptimizerConfig
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.health.targets import count, summary
from megatron_dmtd.training.log import METRICS_FILE, read_metrics
from megatron_dmtd.training.objectives import make_objective
from megatron_dmtd.training.progress import Progress
from tests.support.checkpoints import common_of, tensors_of
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

#: steps of 4 rows whose rows have nothing to predict
BARREN = range(3, 6)


def _progress() -> Progress:
    return Progress.new(make_objective(tiny_config()))


def test_a_run_of_steps_without_targets_is_announced_as_it_doubles_and_when_it_ends() -> None:
    progress, said = _progress(), {}
    for step in range(1, 13):
        message = count(
            progress, num_targets=0 if step > 2 else 5, step=step, lr=2e-3, optimizer=OptimizerConfig(weight_decay=0.1)
        )
        said |= {step: message} if message else {}
    assert list(said) == [3, 4, 6, 10]
    assert "8 such steps in a row, 8 in all. Their gradient is zero, so nothing is learnt" in said[10]
    assert "weight decay, which shrinks them by lr x weight_decay = 0.0002 per step" in said[10]
    again = count(progress, num_targets=1, step=13, lr=2e-3, optimizer=OptimizerConfig())
    assert again == "step 13 has targets again, after 10 steps without"
    assert count(progress, num_targets=1, step=14, lr=2e-3, optimizer=OptimizerConfig()) == ""
    message = count(progress, num_targets=0, step=15, lr=2e-3, optimizer=OptimizerConfig(weight_decay=0.0))
    assert "1 such steps in a row, 11 in all" in message and "decay" not in message and "momentum" in message
    assert summary(progress, steps=15) == "11 of 15 steps had no targets, and nothing was learnt in them"
    assert summary(_progress(), steps=15) == ""


class _Rows:
    """Packed rows of which some have no target."""

    def __init__(self, rows: Any, barren: range) -> None:
        self._rows, self._barren = rows, barren
        self.rows_per_epoch, self.targets_per_epoch = rows.rows_per_epoch, rows.targets_per_epoch

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        is_barren = index // 4 + 1 in self._barren
        return dataclasses.replace(row, loss_mask_N=np.zeros_like(row.loss_mask_N)) if is_barren else row

    def padding_row(self) -> Any:
        return self._rows.padding_row()


def _job(config: Config) -> tuple[dict[str, float], str]:
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.loop import run_training
    from megatron_dmtd.training.rows import Sources, open_corpora

    def open_sources(config: Config) -> Sources:
        sources = open_corpora(config)
        return Sources(train=_Rows(sources.train, BARREN), valid=_Rows(sources.train, range(1, 10**6)))

    with contextlib.redirect_stdout(io.StringIO()) as output:
        values = run_training(config, prepare_megatron(), open_sources=open_sources)
    return values, output.getvalue()


@pytest.mark.multiprocess
def test_a_run_says_and_counts_its_steps_without_targets_over_a_resume(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = tiny_config(
        training={"steps": 4, "eval_at_start": True},
        optimizer={"decay_steps": 8},
        data={"train": (corpus[0],), "valid": (corpus[0],)},
        checkpoint={"dir": str(tmp_path / "run"), "interval": 1, "keep_last": 0},
        logging={"dir": str(tmp_path / "log")},
    )
    first = run_ranks(2, _job, config)[0][1]
    second = run_ranks(2, _job, with_settings(config, training={"steps": 7}))[0][1]
    assert "evaluation: no row of data.valid that was evaluated has a target" in first
    assert "step 3: no row of the step has a target: 1 such steps in a row, 1 in all" in first
    assert "step 4: no row of the step has a target: 2 such steps" in first
    assert "2 of 4 steps had no targets" in first
    assert "step 6 has targets again, after 3 steps without" in second
    assert "3 of 7 steps had no targets" in second
    lines = {line["step"]: line for line in read_metrics(tmp_path / "log" / METRICS_FILE) if "grad_norm" in line}
    assert [step for step, line in lines.items() if line["grad_norm"] == 0.0 and "loss" not in line] == list(BARREN)
    assert [line.get("steps_without_targets", 0) for line in lines.values()] == [0, 0, 1, 2, 3, 3, 3]
    progress = common_of(tmp_path / "run" / paths.step_directory_name(7))["progress"]
    assert (progress["steps_without_targets"], progress["without_targets_in_a_row"]) == (3, 0)
    assert progress["recent_losses"] == [line["loss"] for line in lines.values() if "loss" in line]
    # What the message says: without a gradient the weights still move.
    before, after = (tensors_of(tmp_path / "run" / paths.step_directory_name(step)) for step in (4, 5))
    name = "decoder.layers.mlp.linear_fc2.weight"
    moments = [weights[f"optimizer.state.exp_avg.{name}"] for weights in (before, after)]
    np.testing.assert_allclose(moments[1], config.optimizer.beta1 * moments[0], rtol=1e-6)
    assert not np.array_equal(before[name], after[name])
