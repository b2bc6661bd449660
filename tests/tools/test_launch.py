"""The launcher without a cluster: what it shows, what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from tests.slurm.conftest import ROOT, site_text
from tests.support.tiny import write_corpus
from tools.launch import main


@pytest.fixture
def site(tmp_path):
    path = tmp_path / "site.env"
    path.write_text(site_text(tmp_path))
    return ["--site", str(path)]


def fake_checkpoint(directory: Path) -> None:
    """What the launcher reads of a checkpoint of `train-cpu`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metadata.json").touch()
    (directory / "config.yaml").write_text((ROOT / "examples/quickstart/bidirectional-refresh.yaml").read_text())


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


def test_the_cost_is_that_of_the_remaining_steps_at_the_logged_speed(site, tmp_path, capsys):
    directory = tmp_path / "run/checkpoints/step_00000100"
    directory.mkdir(parents=True)
    fake_checkpoint(directory)
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


def test_a_machine_without_slurm_can_plan_but_not_submit(site, work, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([script("train-cpu"), *site, "--dry-run"]) == 0
    assert main([script("train-cpu"), *site]) == 2
    assert "found: no sbatch" in capsys.readouterr().err


def test_a_controller_that_does_not_answer_is_told(site, work, tmp_path, monkeypatch, capsys):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\nsleep 5\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("megatron_dmtd.launch.submit._SLURM_ANSWERS_S", 0.2)
    assert main([script("train-cpu"), *site]) == 2
    assert "no answer from sbatch" in capsys.readouterr().err


@pytest.fixture
def work(tmp_path):
    """What the jobs of the pipeline read: texts, a tokenizer, published weights, and corpora."""
    for name in ("raw/a.jsonl.zst", "Qwen3-4B-Base/config.json", "quickstart/tokenizer/tokenizer.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    (tmp_path / "raw/a.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "x"}'))
    for name in ("quickstart/data/text-train", "quickstart/data/text-heldout"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_corpus(tmp_path / name, num_documents=5)
    make_checkpoint(tmp_path / "quickstart/base/checkpoints", 150)
    return tmp_path


def make_checkpoint(folder, step: int) -> None:
    directory = folder / f"step_{step:08d}"
    directory.mkdir(parents=True)
    fake_checkpoint(directory)
    (folder / "latest").write_text(directory.name)


@pytest.mark.parametrize("name", ["preprocess", "convert", "train-cpu"])
def test_a_job_whose_inputs_are_there_passes(name, site, work, capsys):
    assert main([script(name), *site, "--check"]) == 0
    assert main([script(name), *site, "--dry-run"]) == 0
    assert "not ready" not in capsys.readouterr().out


UNREADY = {
    "corpus": ("train-cpu", ["--", "--data.train", "[nope]"], "no file nope.bin and no file nope.idx"),
    "valid": ("train-cpu", ["--", "--data.valid", "[nope]"], "no file nope.bin"),
    "tokenizer": ("train-cpu", ["--", "--data.tokenizer", "nope"], "no directory nope (data.tokenizer)"),
    "weights": ("train-cpu", ["--", "--checkpoint.init_from", "nope"], "no directory nope"),
    "weights-of-a-damaged-model": (
        "train-cpu",
        ["--", "--checkpoint.init_from", "Qwen3-4B-Base"],
        "Qwen3-4B-Base/config.json cannot be read",
    ),
    "texts": ("preprocess", ["--", "--input", "nope/*.jsonl"], "no file that matches nope/*.jsonl"),
    "their-tokenizer": ("preprocess", ["--", "--tokenizer", "nope"], "no directory nope (--tokenizer)"),
    "published": ("convert", ["--replace-options", "--", "import", "nope", "out"], "no file or directory nope"),
    "run": ("convert", ["--replace-options", "--", "export", "nope", "out"], "no file or directory nope"),
    "compared": ("convert", ["--replace-options", "--", "verify", "Qwen3-4B-Base", "nope"], "no file or directory nope"),
    "export": ("evaluate", [], "no directory exported/qwen3-4b-bidirectional-refresh"),
    "held-out": ("evaluate", ["--replace-options", "--", "Qwen3-4B-Base", "--data", "nope", "--output", "o"], "no file nope.bin"),
    "served": ("serve", [], "no directory exported/qwen3-4b-bidirectional-refresh"),
}


@pytest.mark.parametrize(("name", "words", "found"), UNREADY.values(), ids=UNREADY)
def test_a_job_without_its_inputs_is_refused_but_may_wait_for_another_that_makes_them(name, words, found, site, work, capsys):
    """`sbatch` is not there: whatever got past the check would be refused for that."""
    assert main([script(name), *site, *words]) == 2
    error = capsys.readouterr().err
    assert found in error and "remedy: " in error
    assert main([script(name), *site, "--dry-run", *words]) == 0
    assert f"--- not ready to be submitted\nfound: {found}" in capsys.readouterr().out or found.startswith("with")
    assert main([script(name), *site, "--check", "--dependency", "afterok:1", *words]) == 0


IMPOSSIBLE = {
    "finished": ("train-cpu", ["--", "--training.steps", "120"], "the run has made 120 of 120 steps, so nothing is left to do"),
    "output": (
        "convert",
        ["--replace-options", "--", "import", "Qwen3-4B-Base", "raw"],
        "raw exists and is not an empty directory",
    ),
    "cycle": ("convert", ["--", "--variant", "causal-refresh"], "no --num-parallel-layers, --mask-token-id"),
    "engine": ("serve", ["--", "--max-batch", "0"], "max_batch=0"),
    "report": ("evaluate", ["--", "--output", "raw"], "raw exists"),
}


@pytest.mark.parametrize(("name", "words", "found"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_no_other_job_can_mend_is_refused_even_if_it_waits_for_one(name, words, found, site, work, capsys):
    make_checkpoint(work / "runs/quickstart-on-slurm/checkpoints", 120)
    assert main([script(name), *site, "--check", "--dependency", "afterok:1", *words]) == 2
    assert found in capsys.readouterr().err


def test_a_started_run_needs_no_first_weights_and_goes_on(site, work):
    make_checkpoint(work / "runs/quickstart-on-slurm/checkpoints", 119)
    assert main([script("train-cpu"), *site, "--check", "--", "--checkpoint.init_from", "gone"]) == 0


def test_an_unknown_option_of_the_jobs_tool_is_refused(site, work, capsys):
    with pytest.raises(SystemExit) as ended:
        main([script("evaluate"), *site, "--check", "--", "--nope"])
    assert ended.value.code == 2 and "unrecognized arguments: --nope" in capsys.readouterr().err


def test_relative_paths_start_at_the_work_folder(site, work, monkeypatch):
    monkeypatch.chdir("/")
    (work / "mine.yaml").write_text((ROOT / "examples/quickstart/base.yaml").read_text())
    words = ["--replace-options", "--", "--config", "mine.yaml"]
    assert main([script("train-cpu"), *site, "--check", "--sbatch=--nodes=1", *words]) == 0


def pipeline(site: list[str], folder, **environment: str) -> subprocess.CompletedProcess[str]:
    """pipeline.sh with an sbatch that takes everything and notes it."""
    sbatch = folder / "programs/sbatch"
    sbatch.parent.mkdir(exist_ok=True)
    sbatch.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\necho 7\n')
    sbatch.chmod(0o755)
    variables = {"PATH": f"{sbatch.parent}:{os.environ['PATH']}", "SITE": site[1], "PYTHON": sys.executable, "SHARDS": "2"}
    command = ["bash", str(ROOT / "examples/slurm/pipeline.sh")]
    return subprocess.run(command, env=os.environ | variables | environment, capture_output=True, text=True, cwd=folder)


def test_the_pipeline_is_submitted_whole_or_not_at_all(site, work):
    done = pipeline(site, work)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "preprocess.sbatch: job 7",
        "convert.sbatch: job 7",
        "train-qwen3-4b-4-nodes.sbatch: job 7, after 7:7",
        "convert.sbatch: job 7, after 7",
        "evaluate.sbatch: job 7, after 7",
    ]
    for missing, found in (
        ("raw/a.jsonl.zst", "no file that matches raw/*.jsonl.zst"),
        ("Qwen3-4B-Base", "no directory Qwen3-4B-Base"),
    ):
        (work / "asked").unlink(missing_ok=True)
        (work / missing).rename(work / "away")
        done = pipeline(site, work)
        (work / "away").rename(work / missing)
        assert done.returncode == 2 and found in done.stderr and done.stdout == "" and not (work / "asked").exists()


def test_a_pipeline_whose_run_is_finished_is_refused(site, work):
    make_checkpoint(work / "runs/mine/checkpoints", 10_000)
    done = pipeline(site, work, RUN="runs/mine")
    assert done.returncode == 2 and "made 10000 of 10000 steps" in done.stderr and not (work / "asked").exists()
