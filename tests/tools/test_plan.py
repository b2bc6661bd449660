import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/plan.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"})


def test_it_prints_a_plan_and_its_numbers() -> None:
    recipe = str(ROOT / "examples/qwen3-4b/bidirectional-refresh.yaml")
    arguments = [
        "--config",
        recipe,
        "--parallel.pipeline",
        "2",
        "--parallel.tensor",
        "1",
        "--parallel.sequence_parallel",
        "false",
    ]
    table = _plan(*arguments, "--world-size", "2", "--training.global_batch_size", "8")
    assert table.returncode == 0, table.stderr
    assert "4,022.5 M parameters" in table.stdout
    numbers = json.loads(_plan(*arguments, "--world-size", "2", "--training.global_batch_size", "8", "--json").stdout)
    assert [stage["num_layers"] for stage in numbers["stages"]] == [28, 8]


def test_it_refuses_what_cannot_run_or_fit() -> None:
    refused = _plan("--parallel.pipeline", "3", "--world-size", "4")
    assert refused.returncode == 2
    assert "4 processes for tensor 1 x pipeline 3" in refused.stderr
    assert "Traceback" not in refused.stderr
    too_large = _plan("--device-gib", "8")
    assert too_large.returncode == 2
    assert "required: no more than the device's 8 GiB" in too_large.stderr
