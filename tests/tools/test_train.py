"""The real entry, as a user starts it: it trains, saves, logs and goes on; what cannot run is refused and leaves no file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dmtd.config import Config, to_yaml
from megatron_dmtd.training.log import read_metrics
from megatron_dmtd.training.paths import latest_directory
from tests.support.tiny import tiny_config, with_settings
from tools.train import main

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def settings(corpus: tuple[str, str], folder: Path) -> Config:
    return with_settings(
        tiny_config(),
        data={"train": (corpus[0],), "valid": (corpus[1],)},
        training={"steps": 3, "eval_batches": 1},
        optimizer={"warmup_steps": 1, "decay_steps": 5},
        checkpoint={"dir": str(folder / "checkpoints"), "interval": 0},
        logging={"dir": str(folder / "logs")},
    )


def start(command: list[str], config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`command tools/train.py --config CONFIG OPTIONS`, from the repository's root."""
    return subprocess.run(
        [*command, "tools/train.py", "--config", str(config), *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def recipe(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(settings(corpus, folder)))
    return path


@pytest.fixture(scope="module")
def finished(recipe) -> Path:
    """The folder of a run of two pipeline stages, three steps long."""
    result = start(TORCHRUN, recipe, "--parallel.pipeline", "2")
    assert result.returncode == 0, result.stderr
    assert "bidirectional-refresh on " in result.stdout and "2 processes" in result.stdout
    assert "saved " in result.stdout
    return recipe.parent


@pytest.mark.multiprocess
def test_two_stages_train_save_and_log(finished):
    directory = latest_directory(finished / "checkpoints")
    assert directory is not None and directory.name == "step_00000003"
    records = read_metrics(finished / "logs" / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    (evaluation,) = [record for record in records if "eval_loss" in record]
    assert evaluation["step"] == 3 and {f"eval_loss_phase_{phase}" for phase in range(4)} <= evaluation.keys()


@pytest.mark.multiprocess
def test_one_process_goes_on_from_it(finished, recipe, tmp_path):
    copy = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", str(finished / "checkpoints"), str(copy)], check=True)
    options = ["--training.steps", "5", "--checkpoint.dir", str(copy), "--logging.dir", str(tmp_path / "logs")]
    result = start([sys.executable], recipe, *options)
    assert result.returncode == 0, result.stderr
    assert "resumed at step 3" in result.stdout and "1 processes" in result.stdout
    records = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [4, 5]
    directory = latest_directory(copy)
    assert directory is not None and directory.name == "step_00000005"


REFUSED = {
    "unknown-key": (["--optimizer.learning_rate", "1"], "unknown setting optimizer.learning_rate", "did you mean optimizer."),
    "split": (["--cycle.num_parallel_layers", "4"], "4 parallel layers of 4 layers", "between 1 and 3"),
    "stages": (
        ["--parallel.pipeline", "2", "--parallel.stage_layers", "[3, 2]"],
        "parallel.stage_layers = 3 + 2 = 5 layers",
        "correct parallel.stage_layers",
    ),
    "tau": (["--cycle.cycle_length", "0"], "cycle.cycle_length = 0", "set cycle.cycle_length to 1 or more"),
    "mask": (["--cycle.mask_token_id", "100"], "cycle.mask_token_id = 100", "special token"),
    "no-corpus": (["--data.train", "[nowhere/corpus]"], "no file nowhere/corpus.bin", "tools/preprocess.py"),
    "corpus-of-another-vocabulary": (["--model.vocab_size", "60", "--cycle.mask_token_id", "59"], "60", ""),
}


def refusal(arguments, monkeypatch, capsys) -> str:
    """What the command prints when it refuses `arguments`. In this process: importing Megatron anew takes seconds."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    assert main() == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert all(f"{part}: " in error for part in ("found", "required", "remedy")), error
    return error


@pytest.mark.parametrize(("options", "found", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_and_leaves_nothing(options, found, remedy, corpus, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(settings(corpus, tmp_path)))
    error = refusal(["--config", str(recipe), *options], monkeypatch, capsys)
    assert found in error.split("required: ")[0] and remedy in error.split("remedy: ")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_empty_corpus_is_refused(corpus, tmp_path, monkeypatch, capsys):
    recipe, empty = tmp_path / "recipe.yaml", tmp_path / "empty"
    recipe.write_text(to_yaml(settings(corpus, tmp_path)))
    empty.with_suffix(".bin").touch()
    empty.with_suffix(".idx").write_bytes(Path(corpus[0] + ".idx").read_bytes())
    error = refusal(["--config", str(recipe), "--data.train", f"[{empty}]"], monkeypatch, capsys)
    assert "DataError" in error and "empty.bin" in error
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "logs").exists()


def test_processes_that_the_layout_does_not_divide_are_refused(corpus, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(settings(corpus, tmp_path)))
    monkeypatch.setenv("WORLD_SIZE", "3")
    error = refusal(["--config", str(recipe), "--parallel.pipeline", "2"], monkeypatch, capsys)
    assert "3 processes for tensor 1 x pipeline 2 = 2 ranks" in error
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.multiprocess
def test_a_checkpoint_of_another_model_is_refused_and_kept(finished, recipe, monkeypatch, capsys):
    before = sorted(path.relative_to(finished) for path in finished.rglob("*"))
    error = refusal(["--config", str(recipe), "--model.num_key_value_heads", "4"], monkeypatch, capsys)
    assert "CheckpointError" in error and "model.num_key_value_heads = 2 in the checkpoint, 4 in this run" in error
    assert sorted(path.relative_to(finished) for path in finished.rglob("*")) == before


def test_a_refusal_of_the_command_itself_has_status_2(recipe, tmp_path):
    result = start([sys.executable], recipe, "--training.stepz", "3", "--logging.dir", str(tmp_path / "logs"))
    assert result.returncode == 2
    assert (
        "ConfigError\nfound: unknown setting training.stepz" in result.stderr and "did you mean training.steps?" in result.stderr
    )
    assert list(tmp_path.iterdir()) == []
