"""The benchmark of training steps measures the forms that it is asked for, each against the baseline of the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.multiprocess
def test_forms_are_measured_against_the_baseline_and_their_limits(tmp_path):
    output = tmp_path / "figures.json"
    options = ["--size", "5M", "--seq-lengths", "64", "--rounds", "1", "--threads", "1", "--json", str(output)]
    forms = ["--forms", "vanilla", "bidirectional-refresh", "HF causal-refresh"]
    command = [sys.executable, "tools/bench/train_step.py", *options, *forms]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["form"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["GPTModel", "vanilla", "bidirectional-refresh", "HF causal-refresh"]
    assert rows["GPTModel"]["time_ratio_to_gpt"] == 1
    assert rows["vanilla"]["flops_ratio"] == 1 and 1 < rows["bidirectional-refresh"]["flops_ratio"] < 2
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(64 / row["seconds"])
        assert row["share_of_limit"] == pytest.approx(row["flops_ratio"] / row["time_ratio_to_gpt"])
        assert 0 < row["share_of_machine"] < 1
        assert all(form in done.stdout for form in rows)
