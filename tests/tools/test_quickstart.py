"""The quickstart, small: the same parts in the same order, on a folder of texts instead of the standard library."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.quickstart import main

ROOT = Path(__file__).parents[2]
MODELS = ("bidirectional-refresh", "vanilla")


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for i in range(60):
        lines = [f"def f{i}_{j}(x):\n    return x + {j * i}\n" for j in range(20)]
        (folder / f"{i}.txt").write_text("\n".join(lines))


def start(texts: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/quickstart.py", "--input", str(texts), "--output", str(output)]
    return subprocess.run(
        [*command, "--heldout-fraction", "0.15", "--steps", "4", "--new-tokens", "9", "--timed-runs", "1", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    write_texts(folder / "texts")
    return folder


@pytest.fixture(scope="module")
def first(folder) -> subprocess.CompletedProcess[str]:
    result = start(folder / "texts", folder / "out")
    assert result.returncode == 0, result.stderr + result.stdout
    return result


def numbers_of_row(report: str, heading: str, name: str) -> list[float]:
    section = report.split(heading)[1].split("\n## ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {name} |")]
    return [float(cell) for cell in row.split("|")[2:-1]]


@pytest.mark.multiprocess
def test_one_command_gives_a_report_and_what_it_speaks_of(first, folder):
    out, report = folder / "out", (folder / "out" / "report.md").read_text()
    assert report in first.stdout
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    for model in MODELS:
        assert (out / model / "export" / "config.json").is_file()
        start_loss, end_loss, held_out = numbers_of_row(report, "## Loss", f"`{model}`")
        assert 5 < start_loss < 9 and end_loss < start_loss and held_out < start_loss
    before, after = re.search(r"\(loss ([\d.]+) to ([\d.]+)\)", report).groups()
    assert 7 < float(before) < 9 and float(after) < float(before)
    starts = {model: numbers_of_row(report, "## Loss", f"`{model}`")[0] for model in MODELS}
    assert starts["vanilla"] < float(before) - 0.05, "the models continue the base"
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
    assert found["prompt_tokens"] == 62 and len(found["prompts"]) == 3
    for model in MODELS:
        assert found["models"][model]["agreeing"] == 3 * 9
        assert found["models"][model]["tokens_per_s"] > 0
    parameters = {found["models"][model]["parameters"] for model in MODELS}
    assert len(parameters) == 1, "the method adds no parameter"


@pytest.mark.multiprocess
def test_a_second_run_does_nothing_again(first, folder):
    kept = folder / "out" / MODELS[0] / "metrics.jsonl"
    before = kept.stat().st_mtime_ns
    again = start(folder / "texts", folder / "out")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already done") == 8
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
