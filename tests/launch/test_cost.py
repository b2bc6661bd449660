"""Node hours, on figures that divide evenly; `tests/tools/test_launch.py` has whole scripts."""

from types import SimpleNamespace

import pytest

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.infra.json_lines import to_line
from megatron_dmtd.launch.cost import estimate
from tests.support.tiny import tiny_config


def job(**changes):
    return SimpleNamespace(**{"num_nodes": 4, "num_tasks": 1, "time_limit_s": 7200, "uses_gpus": True} | changes)


@pytest.fixture
def site(tmp_path):
    return SimpleNamespace(work_dir=str(tmp_path), gpu_peak_tflops=100.0, cpu_peak_tflops=1.0, expected_mfu=0.5)


def plan(**sections):
    """8 ranks, and a step of 4e14 FLOPs: one second at half of 100 TFLOP/s each."""
    config = tiny_config(**{"training": {"steps": 3600}, "logging": {"dir": ""}} | sections)
    return SimpleNamespace(config=config, world_size=8, step_flops=4e14)


def test_any_other_job_costs_its_time_limit_for_each_task(site):
    one, many = estimate(job(), site, None), estimate(job(num_tasks=5), site, None)
    assert (one.node_hours, one.hours, many.node_hours, many.hours) == (8.0, 2.0, 40.0, 2.0)
    assert one.basis == "at most: 4 node(s) for the whole time limit" and "5 tasks of 4" in many.basis


def test_a_training_costs_its_flops_at_the_expected_share_of_the_peak(site):
    cost = estimate(job(), site, plan())
    assert (cost.hours, cost.node_hours) == (1.0, 4.0)
    assert cost.basis == "3600 steps of 1 s (50% of 100 TFLOP/s on 8 ranks)"
    assert estimate(job(uses_gpus=False), site, plan()).hours == 100.0


def test_only_the_steps_that_are_left_cost(site, tmp_path):
    directory = tmp_path / "run" / "step_00000900"
    directory.mkdir(parents=True)
    for name in ("metadata.json", "config.yaml"):
        (directory / name).touch()
    (tmp_path / "run" / "latest").write_text(directory.name)
    cost = estimate(job(), site, plan(checkpoint={"dir": "run"}))
    assert cost.hours == 0.75 and cost.basis.startswith("2700 steps")


def test_logged_steps_tell_better_and_a_torn_last_line_does_not_matter(site, tmp_path):
    lines = [{"step": step, "step_time_s": seconds} for step, seconds in ((1, 50.0), (2, 2.0), (3, 2.0))]
    (tmp_path / "log").mkdir()
    metrics = tmp_path / "log" / "metrics.jsonl"
    metrics.write_text("".join(map(to_line, [*lines, {"step": 3, "eval_loss": 1.0}])) + '{"step": 4, "step_ti')
    cost = estimate(job(), site, plan(logging={"dir": "log"}))
    assert cost.hours == 2.0 and "median of the last 3 logged steps" in cost.basis
    metrics.write_text(to_line({"step": 1, "eval_loss": 1.0}))
    assert "100 TFLOP/s" in estimate(job(), site, plan(logging={"dir": "log"})).basis, "no step was timed"
    metrics.write_text("no log\n")
    with pytest.raises(ConfigError, match="line 1"):
        estimate(job(), site, plan(logging={"dir": "log"}))
