"""The quickstart, small: the same parts in the same order, on a folder of texts, interrupted and killed halfway."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.quickstart import main

ROOT = Path(__file__).parents[2]
MODELS = ("bidirectional-refresh", "vanilla")


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for i in range(60):
        lines = [f"def f{i}_{j}(x):\n    return x + {j * i}\n" for j in range(20)]
        (folder / f"{i}.txt").write_text("\n".join(lines))


SMALL = ("--heldout-fraction", "0.15", "--steps", "4", "--new-tokens", "9", "--timed-runs", "1", "--large-layers", "1", "1")


def command(texts: Path, output: Path) -> list[str]:
    return [sys.executable, "tools/quickstart.py", "--input", str(texts), "--output", str(output), *SMALL]


def start(texts: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(texts, output), cwd=ROOT, capture_output=True, text=True, timeout=400)


def stopped_in_training(texts: Path, output: Path, number: int) -> tuple[int, str, list[int]]:
    """Send a signal to a quickstart, as a terminal does to its group, once its ranks are there.

    Returns its status, its standard error, and those of its processes that are still there 90 s later.
    """
    with subprocess.Popen(
        command(texts, output), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as quickstart:
        deadline, family = time.monotonic() + 300, []
        while sum("tools/train.py" in " ".join(command_line(process)) for process in family) < 3:
            assert quickstart.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
            family = psutil.Process(quickstart.pid).children(recursive=True)
        os.killpg(quickstart.pid, number)
        error = quickstart.communicate(timeout=120)[1]
    _, alive = psutil.wait_procs(family, timeout=90)  # torchrun gives its ranks 30 s to save
    return quickstart.returncode, error, [process.pid for process in alive]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    write_texts(folder / "texts")
    return folder


@pytest.fixture(scope="module")
def interrupted(folder) -> tuple[int, str, list[int]]:
    return stopped_in_training(folder / "texts", folder / "out", signal.SIGINT)


@pytest.fixture(scope="module")
def killed(folder, interrupted) -> tuple[int, str, list[int]]:
    return stopped_in_training(folder / "texts", folder / "out", signal.SIGKILL)


@pytest.fixture(scope="module")
def first(folder, killed) -> subprocess.CompletedProcess[str]:
    """What is done, from where the interrupted and the killed one were."""
    result = start(folder / "texts", folder / "out")
    assert result.returncode == 0, result.stderr + result.stdout
    return result


def numbers_of_row(report: str, heading: str, name: str) -> list[float]:
    section = report.split(heading)[1].split("\n## ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {name} |")]
    return [float(cell) for cell in row.split("|")[2:-1]]


@pytest.mark.multiprocess
def test_ctrl_c_ends_it_with_all_its_ranks_and_a_short_message(interrupted):
    status, error, alive = interrupted
    assert (status, alive) == (130, [])
    assert "Traceback" not in error and "ChildFailedError" not in error
    lines = [line.rpartition("\r")[2] for line in error.splitlines()]
    assert [line for line in lines if "interrupted" in line] == [
        "interrupted: waits until this part has stopped; Ctrl-C again does not wait",
        "interrupted; run the same command to resume",
    ]


@pytest.mark.multiprocess
def test_ranks_of_a_killed_one_end_too_and_the_next_one_goes_on(killed, first):
    status, _, alive = killed
    assert (status, alive) == (-signal.SIGKILL, []) and first.stdout.count("already done") == 2


@pytest.mark.multiprocess
def test_one_command_gives_a_report_and_what_it_speaks_of(first, folder):
    out, report = folder / "out", (folder / "out" / "report.md").read_text()
    assert (out / "report.html").stat().st_size > 10_000 and str(out / "report.html") in first.stdout
    assert "held-out loss, nats per token" in first.stdout
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    for model in MODELS:
        assert (out / model / "export" / "config.json").is_file()
        start_loss, end_loss, held_out = numbers_of_row(report, "## Loss", f"`{model}`")
        assert all(0 < value < 8 for value in (start_loss, end_loss, held_out)), "four steps"
    before, after = re.search(r"\(loss ([\d.]+) to ([\d.]+)\)", report).groups()
    assert 6 < float(before) < 8 and 4 < float(after) < 8
    starts = {model: numbers_of_row(report, "## Loss", f"`{model}`")[0] for model in MODELS}
    assert starts["vanilla"] != pytest.approx(float(before), abs=1e-3), "the models continue the base"
    config = json.loads((out / MODELS[0] / "export" / "config.json").read_text())
    assert config["model_type"] == "dmtdqwen3"
    assert json.loads((out / MODELS[1] / "export" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.multiprocess
def test_the_report_compares_held_out_loss_phase_by_phase(first, folder):
    report = (folder / "out" / "report.md").read_text()
    rows = [
        numbers_of_row(report, "## Held-out loss by phase", name) for name in ("bidirectional-refresh", "vanilla", "difference")
    ]
    assert [len(row) for row in rows] == [5, 5, 5]
    for mine, theirs, difference in zip(*rows):
        assert mine - theirs == pytest.approx(difference, abs=2e-3)


@pytest.mark.multiprocess
def test_decoding_in_cycles_is_the_model_that_was_trained(first, folder):
    found = json.loads((folder / "out" / "decoding.json").read_text())
    assert found["prompt_tokens"] == 22 and len(found["prompts"]) == 4
    for model in MODELS:
        assert found["models"][model]["agreeing"] == 4 * 9
        assert found["models"][model]["tokens_per_s"] > 0
    parameters = {found["models"][model]["parameters"] for model in MODELS}
    assert len(parameters) == 1, "the method adds no parameter"


@pytest.mark.multiprocess
def test_a_second_run_does_nothing_again(first, folder):
    kept = folder / "out" / MODELS[0] / "metrics.jsonl"
    before = kept.stat().st_mtime_ns
    again = start(folder / "texts", folder / "out")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already done") == 9
    assert kept.stat().st_mtime_ns == before


@pytest.mark.multiprocess
def test_a_command_that_the_report_proposes_parses(first, folder):
    report = (folder / "out" / "report.md").read_text()
    commands = report.split("## What next")[1].split("```")[1]
    assert "--cycle.variant 'causal-norefresh'" in commands
    for script in re.findall(r"tools/\w+\.py", commands):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("option", ["--steps", "--new-tokens", "--timed-runs"])
def test_counts_below_one_are_refused(option, tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out"), option, "0"]) == 2
    assert f"found: {option} 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_input_is_refused_with_the_log(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out"), "--input", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert "PartError" in error and "train_tokenizer.log" in error and str(tmp_path / "absent") in error
