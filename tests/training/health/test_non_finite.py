"""Numbers that are not finite change nothing, are written down, and stop the run or let it pass a bounded number of times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.training import exit_codes
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.log import read_metrics
from tests.support.checkpoints import Job, assert_same_checkpoint, common_of
from tests.support.jobs import lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings


def _config(corpus: tuple[str, str], folder: Path, **sections: Any) -> Config:
    config = with_settings(
        tiny_config(),
        data={"train": (corpus[0],)},
        checkpoint={"dir": str(folder / "checkpoints"), "interval": 0},
        logging={"dir": str(folder / "log")},
    )
    return with_settings(config, **sections)


def _spoil(config: Config, spoiled_rank: int, spoiled_steps: tuple[int, ...]) -> tuple[Any, ...]:
    """`run_job`, with a gradient of one rank that is NaN at some steps."""
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron_dmtd.training import loop

    real = loop.train_step

    def train_step(run: Any, iterator: Any) -> Any:
        if run.step + 1 not in spoiled_steps or torch.distributed.get_rank() != spoiled_rank:
            return real(run, iterator)
        parameter = run.models[0].decoder.layers[0].mlp.linear_fc1.weight
        handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
        try:
            return real(run, iterator)
        finally:
            handle.remove()

    loop.train_step = train_step
    from megatron_dmtd.training.health.non_finite import NonFiniteError

    try:
        return run_job(config)
    except NonFiniteError as error:
        return ("bad numbers", error.found, error.required)


@pytest.mark.multiprocess
def test_a_bad_step_stops_the_run_with_an_account_and_the_state_before_it(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path / "bad", parallel={"pipeline": 1})
    results = run_ranks(2, _spoil, config, 1, (3,))
    assert [kind for kind, _, _ in results] == ["bad numbers"] * 2
    assert "gradient norm nan at step 3, rows 8 to 11" in results[0][1]
    report = json.loads((tmp_path / "bad" / "checkpoints" / "bad_step_00000003.json").read_text())
    assert (report["step"], report["rows"], report["grad_norm"]) == (3, [8, 11], "nan")
    assert [rank["rows"] for rank in report["ranks"]] == [[[8], [10]], [[9], [11]]]
    assert [(rank["rank"], rank["data_rank"]) for rank in report["ranks"]] == [(0, 0), (1, 1)]
    assert all(math.isfinite(float(loss)) for rank in report["ranks"] for loss in rank["loss_of_microbatches"])
    assert any("linear_fc1" in name for rank in report["ranks"] for name in rank["parameters_with_bad_gradients"])
    assert report["config"]["data"]["train"] == list(config.data.train)
    # The state before the step is saved: without the fault the same command goes on as if nothing had happened.
    saved = paths.latest_directory(Path(config.checkpoint.dir))
    assert saved is not None and saved.name == "step_00000002"
    run_ranks(2, run_job, config)
    whole = _config(corpus, tmp_path / "whole")
    run_ranks(2, run_job, whole)
    assert_same_checkpoint(Path(config.checkpoint.dir) / "step_00000006", Path(whole.checkpoint.dir) / "step_00000006")
    assert lines_of(config) == lines_of(whole)


@pytest.mark.multiprocess
@pytest.mark.parametrize("optimizer", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["distributed", "plain"])
def test_a_bounded_number_of_bad_steps_is_skipped_and_counted_over_the_whole_run(
    optimizer: bool, corpus: tuple[str, str], tmp_path: Path
) -> None:
    sections = {"training": {"max_bad_steps": 2}, "parallel": {"distributed_optimizer": optimizer}}
    config = _config(corpus, tmp_path, **sections)
    first = with_settings(config, training={"steps": 3}, optimizer={"decay_steps": 6})
    assert run_ranks(1, _spoil, first, 0, (2,))[0][0] == "done"
    assert run_ranks(1, _spoil, with_settings(config, optimizer={"decay_steps": 6}), 0, (4, 6))[0][0] == "bad numbers"
    saved = Path(config.checkpoint.dir) / "step_00000005"
    progress = common_of(saved)["progress"]
    assert (progress["step"], progress["rows"], progress["bad_steps"]) == (5, 20, 2)
    lines = read_metrics(Path(config.logging.dir) / "metrics.jsonl")
    assert [(line["step"], line["skipped_steps"]) for line in lines if "skipped_steps" in line] == [(2, 1.0), (4, 2.0)]
    assert [line["step"] for line in lines if "lr" in line] == [1, 2, 3, 4, 5]
    assert all("loss" not in line for line in lines if line["step"] in (2, 4)), "a bad loss is in no mean"
    assert sorted(path.name for path in Path(config.checkpoint.dir).glob("bad_step_*")) == [
        f"bad_step_{step:08d}.json" for step in (2, 4, 6)
    ]
    # A resume may allow more of them.
    more = with_settings(config, training={"max_bad_steps": 3}, optimizer={"decay_steps": 6})
    assert run_ranks(1, _spoil, more, 0, (6,))[0][0] == "done"
    assert common_of(Path(config.checkpoint.dir) / "step_00000006")["progress"]["bad_steps"] == 3


def _skip_and_compare(config: Config) -> bool:
    """Whether a skipped step leaves weights, moments and Adam's own count as they were."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=0)
    train_step(run, iterator)
    inner = run.optimizer.chained_optimizers[0].optimizer

    def snapshot() -> list[Any]:
        state = [value.clone() for parameter in inner.state.values() for value in parameter.values()]
        weights = [parameter.detach().clone() for parameter in run.model.parameters()]
        return [*state, *weights, torch.tensor([run.step, run.rows, *(group["step"] for group in inner.param_groups)])]

    before = snapshot()
    handle = run.models[0].decoder.layers[0].mlp.linear_fc1.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = train_step(run, iterator)
    handle.remove()
    unchanged = all(torch.equal(one, other) for one, other in zip(before, snapshot()))
    applied = train_step(run, iterator).is_applied
    return unchanged and not result.is_applied and applied and len(before) > 10


@pytest.mark.multiprocess
@pytest.mark.parametrize("sections", [{}, {"parallel": {"distributed_optimizer": False}}, {"training": {"precision": "bf16"}}])
def test_a_bad_step_changes_nothing_and_the_next_is_sound(
    sections: dict[str, Any], corpus: tuple[str, str], tmp_path: Path
) -> None:
    assert run_ranks(1, _skip_and_compare, _config(corpus, tmp_path, **sections)) == [True]


def test_a_jump_of_the_loss_is_a_spike_and_noise_is_not() -> None:
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron_dmtd.training.health.non_finite import SPIKE_MINIMUM, SPIKE_WINDOW, spike

    recent: list[float] = []
    calm = [2.0 + 0.1 * (-1) ** index for index in range(100)]
    assert [spike(recent, loss, deviations=6.0) for loss in calm] == [None] * 100
    assert recent == calm[-SPIKE_WINDOW:]
    assert spike(recent, 2.59, deviations=6.0) is None
    found = spike(recent[:SPIKE_WINDOW], 4.0, deviations=6.0)
    assert found == (pytest.approx(2.0, abs=0.02), pytest.approx(0.1, abs=0.03))
    assert spike(recent[:SPIKE_WINDOW], 4.0, deviations=0.0) is None
    assert spike(calm[: SPIKE_MINIMUM - 1], 4.0, deviations=6.0) is None, "too few losses to tell"


def _rows_match(config: Config) -> bool:
    from megatron_dmtd.data.batches.loader import collate
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.health.non_finite import rows_of_microbatch

    run = start.prepare(config, prepare_megatron())
    dataset = rows.open_corpus(config, config.data.train)
    run.rows = 8
    iterator = rows.microbatches(run, dataset, first_row=run.rows)
    pairs = [(next(iterator), collate([dataset[row] for row in rows_of_microbatch(run, index)])) for index in range(2)]
    return all(torch.equal(one.tokens_BN, other.tokens_BN) for one, other in pairs)


@pytest.mark.multiprocess
def test_the_rows_of_the_account_are_those_that_the_loader_gave(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, training={"global_batch_size": 8, "micro_batch_size": 2})
    assert run_ranks(2, _rows_match, config) == [True, True]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_command_ends_with_its_own_status(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, optimizer={"lr": 1e38, "min_lr": 0.0, "clip_grad": 0.0})
    with Job(config, tmp_path) as job:
        assert job.wait() == [exit_codes.NON_FINITE], job.output()
    assert "NonFiniteError" in job.output() and "bad_step_" in job.output()
