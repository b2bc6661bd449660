"""The quickstart, small: the same parts in the same order, on a folder of texts instead of the standard library."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.quickstart.decode import heldout_prompts
from megatron_dmtd.quickstart.parts import Part, PartError, Parts, run_command
from megatron_dmtd.quickstart.plan import Machine, Plan
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


def make_part(path: Path, inputs: dict, calls: list[str]) -> Part:
    def work() -> None:
        calls.append("worked")
        path.write_text("x")

    return Part(name="a part", inputs=inputs, outputs=(path,), work=work)


def test_a_part_is_done_once_and_anew_when_its_inputs_change(tmp_path):
    calls, said = [], []
    parts, path = Parts(tmp_path, say=said.append), tmp_path / "result"
    parts.run(make_part(path, {"steps": (1, 2)}, calls))
    parts.run(make_part(path, {"steps": (1, 2)}, calls))
    assert calls == ["worked"] and said == ["a part: already done"]
    parts.run(make_part(path, {"steps": (1, 3)}, calls))
    assert calls == ["worked"] * 2
    path.unlink()
    parts.run(make_part(path, {"steps": (1, 3)}, calls))
    assert calls == ["worked"] * 3


def test_an_interrupted_part_finds_what_it_left_and_an_outdated_one_does_not(tmp_path):
    parts, path, seen = Parts(tmp_path, say=print), tmp_path / "result", []

    def fail() -> None:
        seen.append(path.exists())
        path.write_text("half")
        raise KeyboardInterrupt

    for inputs in (1, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            parts.run(Part(name="a part", inputs={"value": inputs}, outputs=(path,), work=fail))
    assert seen == [False, True, False]


def test_a_torn_stamp_means_not_done(tmp_path):
    calls, path = [], tmp_path / "result"
    Parts(tmp_path, say=print).run(make_part(path, {}, calls))
    (tmp_path / ".parts" / "a-part.json").write_text('{"inputs": {')
    Parts(tmp_path, say=print).run(make_part(path, {}, calls))
    assert calls == ["worked"] * 2


def test_a_failed_command_shows_the_end_of_its_log_and_where_it_is(tmp_path):
    log = tmp_path / "logs" / "command.log"
    code = "import sys; print('the reason'); sys.exit(7)"
    with pytest.raises(PartError, match="exit status 7") as caught:
        run_command([sys.executable, "-c", code], log=log, cwd=tmp_path, environment=os.environ, poll_s=0.01)
    assert "the reason" in caught.value.found and str(log) in caught.value.remedy


def test_an_interruption_ends_the_command(tmp_path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    log = tmp_path / "command.log"
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    polls = iter(range(10**6))

    def watch() -> None:
        if next(polls) and len(log.read_text().splitlines()) > 1:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", code], log=log, cwd=tmp_path, environment=os.environ, watch=watch, poll_s=0.01)
    pid = int(log.read_text().splitlines()[-1])
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "processes", "threads"), [(0, 2, 2, 1), (0, 9, 2, 4), (0, 1, 2, 1), (1, 16, 1, 16), (8, 64, 2, 32)]
)
def test_processes_follow_the_machine(num_gpus, num_cores, processes, threads):
    machine = Machine(num_gpus=num_gpus, num_cores=num_cores)
    assert (machine.num_processes, machine.threads_per_process) == (processes, threads)
    plan = Plan(root=ROOT, directory=Path("/nowhere"), machine=machine)
    assert plan.config("vanilla").parallel.pipeline == processes
    assert f"--nproc-per-node {processes} " in " ".join(plan.train_command("vanilla"))


def test_too_few_held_out_documents_are_refused(corpus):
    with pytest.raises(DMTDError, match="held-out documents of more than 5000 tokens"):
        heldout_prompts(corpus[1], count=3, num_tokens=5000)


@pytest.mark.parametrize("option", ["--steps", "--new-tokens", "--timed-runs"])
def test_counts_below_one_are_refused(option, tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out"), option, "0"]) == 2
    assert f"found: {option} 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_input_is_refused_with_the_log(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out"), "--input", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert "PartError" in error and "train_tokenizer.log" in error and str(tmp_path / "absent") in error
