"""The launcher without a cluster: what it shows, what it refuses."""

import json

import pytest

from tests.slurm.conftest import ROOT, site_text
from tools.launch import main


@pytest.fixture
def site(tmp_path):
    path = tmp_path / "site.env"
    path.write_text(site_text(tmp_path))
    return ["--site", str(path)]


def script(name: str) -> str:
    return str(ROOT / "examples/slurm" / f"{name}.sbatch")


def test_a_dry_run_shows_script_layout_and_node_hours(site, tmp_path, capsys):
    assert main([script("train-qwen3-4b-4-nodes"), *site, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "#SBATCH --nodes=4" in output and "32 processes = tensor 1 x pipeline 1 x data 32" in output
    # 10,000 steps of 24,568.35 TFLOP at 35 % of 32 x 989 TFLOP/s, on 4 nodes
    assert "24.64 node hours, 6.16 hours on 4 node(s): 10000 steps of 2.22 s (35% of 989 TFLOP/s on 32 ranks)" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site.env"]


def test_options_after_the_dashes_change_layout_and_cost(site, capsys):
    assert (
        main([script("train-qwen3-4b-1-node"), *site, "--dry-run", "--", "--training.steps", "1000", "--parallel.tensor", "2"])
        == 0
    )
    output = capsys.readouterr().out
    assert "8 processes = tensor 2 x pipeline 1 x data 4" in output and "2.46 node hours" in output


def test_the_cost_is_that_of_the_remaining_steps_at_the_pace_that_was_logged(site, tmp_path, capsys):
    directory = tmp_path / "run/checkpoints/step_00000100"
    directory.mkdir(parents=True)
    for name in ("metadata.json", "config.yaml"):
        (directory / name).touch()
    (tmp_path / "run/checkpoints/latest").write_text(directory.name)
    lines = [{"step": 99, "step_time_s": 30.0}, {"step": 100, "step_time_s": 36.0}, {"step": 101, "step_time_s": 90.0}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--training.steps", "300", "--checkpoint.dir", "run/checkpoints", "--logging.dir", "run"]
    assert main([script("train-cpu"), *site, "--dry-run", "--", *options]) == 0
    assert "4.00 node hours, 2.00 hours on 2 node(s): 200 steps of 36 s (median of the last 3 logged" in capsys.readouterr().out


def test_steps_of_a_ramp_up_cost_by_their_rows(site, tmp_path, capsys):
    """8 rows in each of the first 4 steps, 16 in each of the next 2, and 24 in the other 14."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps({"step": 1, "step_time_s": 100.0}) + "\n")
    options = ["--training.steps", "20", "--logging.dir", "run", "--training.global_batch_size", "24"]
    options += ["--training.rampup_batch_size", "[8, 8, 64]"]
    assert main([script("train-cpu"), *site, "--dry-run", "--", *options]) == 0
    # 300 s for 24 rows, where 8 rows took 100; 14 + 8/3 full steps
    assert "1.39 hours on 2 node(s): 20 steps of at most 300 s (median of the last 1 logged" in capsys.readouterr().out


def test_other_jobs_are_charged_their_time_limit(site, capsys):
    assert main([script("preprocess"), *site, "--dry-run", "--sbatch=--array=0-3"]) == 0
    assert "48.00 node hours, 12.00 hours on 1 node(s): at most: 4 tasks of 1 node(s)" in capsys.readouterr().out


REFUSED = {
    "layout": ("train-cpu", ["--sbatch=--nodes=3"], "3 processes for tensor 1 x pipeline 2"),
    "memory": ("train-qwen3-4b-1-node", ["--", "--training.micro_batch_size", "4"], "80 GiB"),
    "setting": ("train-cpu", ["--", "--optimizer.rate", "1"], "unknown setting optimizer.rate"),
}


@pytest.mark.parametrize(("name", "words", "found"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused(name, words, found, site, capsys):
    assert main([script(name), *site, *words]) == 2
    error = capsys.readouterr().err
    assert found in error and "remedy: " in error


def test_a_machine_without_slurm_can_plan_but_not_submit(site, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([script("train-cpu"), *site, "--dry-run"]) == 0
    assert main([script("train-cpu"), *site]) == 2
    assert "found: no sbatch" in capsys.readouterr().err


def test_a_controller_that_does_not_answer_is_told(site, tmp_path, monkeypatch, capsys):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\nsleep 5\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("megatron_dmtd.launch.submit._SLURM_ANSWERS_S", 0.2)
    assert main([script("train-cpu"), *site]) == 2
    assert "no answer from sbatch" in capsys.readouterr().err
