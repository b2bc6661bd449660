import json
import math
import subprocess
import sys

import pytest

from megatron_dmtd.config import LoggingConfig
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.training.log import NOT_RESUMED, RunLog, read_metrics
from tests.support.disks import small_disk


def run_steps(directory, steps, *, resumed_step=0, **settings):
    config = LoggingConfig(dir=str(directory), progress=False, **settings)
    with RunLog(config, is_writer=True, total_steps=10, resumed_step=resumed_step) as log:
        for step in steps:
            log.log(step, {"loss": step / 2, "lr": 1e-4})


def steps_in(path):
    return [record["step"] for record in read_metrics(path)]


def test_each_log_is_one_json_line_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9 + 0.25)
    run_steps(tmp_path, [1, 2])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[1].startswith('{"step": 2, "time": 1000000000.25, "elapsed_s": ')
    records = [json.loads(line) for line in lines]
    assert 0 <= records[0].pop("elapsed_s") <= records[1].pop("elapsed_s") < 60
    assert records == [{"step": step, "time": 1e9 + 0.25, "loss": step / 2, "lr": 1e-4} for step in (1, 2)]


def test_elapsed_seconds_go_on_over_attempts_without_the_time_between_them_and_without_lost_steps(tmp_path, monkeypatch):
    clock = iter([100.0, 101.0, 103.0, 900.0, 901.0, 2000.0, 2004.0])
    monkeypatch.setattr("megatron_dmtd.training.log.time.monotonic", lambda: next(clock))
    run_steps(tmp_path, [1, 2])
    run_steps(tmp_path, [2], resumed_step=1)
    run_steps(tmp_path, [3], resumed_step=2)
    assert [record["elapsed_s"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 6.0]


def test_lines_of_before_they_had_times_can_be_followed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    run_steps(tmp_path, [2], resumed_step=1)
    assert 0 <= read_metrics(tmp_path / "metrics.jsonl")[1]["elapsed_s"] < 60


def test_a_new_run_puts_even_the_baseline_of_an_old_one_aside(tmp_path):
    run_steps(tmp_path, [0, 1])
    run_steps(tmp_path, [1], resumed_step=0)
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1]
    run_steps(tmp_path, [0], resumed_step=NOT_RESUMED)
    assert steps_in(tmp_path / "metrics.jsonl") == [0]
    assert steps_in(tmp_path / "metrics.superseded.jsonl") == [1, 0, 1]


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    log = RunLog(LoggingConfig(dir=str(tmp_path), progress=False), is_writer=True, total_steps=10)
    log.log(1, {"loss": 2.0})
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    log.close()
    log.close()


def test_a_resumed_run_has_no_step_twice(tmp_path):
    run_steps(tmp_path, [1, 2, 3, 4, 5])
    run_steps(tmp_path, [4, 5, 6], resumed_step=3)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps_in(tmp_path / "metrics.superseded.jsonl") == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.superseded.jsonl"]


def test_a_run_that_starts_over_keeps_the_old_lines_aside(tmp_path):
    run_steps(tmp_path, [1, 2])
    run_steps(tmp_path, [1], resumed_step=0)
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    assert steps_in(tmp_path / "metrics.superseded.jsonl") == [1, 2]


def test_a_torn_last_line_is_dropped(tmp_path):
    run_steps(tmp_path, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    run_steps(tmp_path, [3], resumed_step=2)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_a_sound_log_is_not_written_anew(tmp_path):
    run_steps(tmp_path, [1, 2])
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    run_steps(tmp_path, [3], resumed_step=2)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


def test_a_full_disk_takes_no_half_line_and_the_next_attempt_makes_up_for_it_once(tmp_path):
    with small_disk(tmp_path / "small", "size=16k") as folder:
        (folder / "other").write_bytes(bytes(12288))
        config = LoggingConfig(dir=str(folder), progress=False)
        with RunLog(config, is_writer=True, total_steps=200) as log:
            for step in range(1, 151):
                log.log(step, {"loss": float(step), "words": 1.0})
            assert log.failure == "metrics.jsonl: No space left on device"
            assert "the log cannot be written: metrics.jsonl: No space left" in log.error(saved=tmp_path).found
        written = steps_in(folder / "metrics.jsonl")
        assert (folder / "metrics.jsonl").read_bytes().endswith(b"}\n"), "no half of a line"
        assert len(written) > 20 and written + [record["step"] for record in log.unwritten] == list(range(1, 151))
        (folder / "other").unlink()
        for _ in range(2):
            with RunLog(config, is_writer=True, total_steps=200, resumed_step=150) as again:
                again.make_up(log.unwritten)
                assert again.error(saved=None) is None
            assert steps_in(folder / "metrics.jsonl") == list(range(1, 151))


def test_a_console_that_takes_no_more_is_noted_and_does_not_change_the_exit_status(tmp_path):
    program = """
import sys
from megatron_dmtd.config import LoggingConfig
from megatron_dmtd.training.log import RunLog
with RunLog(LoggingConfig(progress=False), is_writer=True, total_steps=1) as log:
    log.message("hello")
    log.message("again")
sys.stderr.write(log.failure)
sys.exit(7)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (7, "the console: No space left on device")


@pytest.mark.parametrize("line", ["not json", '{"loss": 1.0}', "3"])
def test_a_foreign_metrics_file_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        run_steps(tmp_path, [1])
    assert path.read_text() == line + "\n"


def test_nan_stays_valid_json_and_survives_a_resume(tmp_path):
    config = LoggingConfig(dir=str(tmp_path), progress=False)
    with RunLog(config, is_writer=True, total_steps=2) as log:
        log.log(1, {"loss": math.nan, "grad_norm": -math.inf})
    run_steps(tmp_path, [2], resumed_step=1)
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    record = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {name: record[name] for name in ("step", "loss", "grad_norm")} == {"step": 1, "loss": "nan", "grad_norm": "-inf"}
    assert math.isnan(float(record["loss"]))


def test_the_console_line_shows_step_and_values(tmp_path, capsys):
    with RunLog(LoggingConfig(progress=False), is_writer=True, total_steps=10) as log:
        log.log(3, {"loss": 2.34567, "lr": 3e-4, "tokens_per_s": 123456.7})
        log.message("saved")
    assert capsys.readouterr().out == "step 3/10  loss 2.346  lr 3.000e-04  tokens_per_s 123,457\nsaved\n"


def test_other_ranks_write_nothing(tmp_path, capsys):
    config = LoggingConfig(dir=str(tmp_path / "log"), wandb_project="p")
    with RunLog(config, is_writer=False, total_steps=10) as log:
        log.advance(1)
        log.log(1, {"loss": 1.0})
        log.message("hello")
    assert not (tmp_path / "log").exists()
    assert capsys.readouterr().out == ""


def test_the_progress_bar_follows_the_steps(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    log = RunLog(LoggingConfig(progress=True), is_writer=True, total_steps=10, resumed_step=4)
    bar = log._bar
    assert not bar.disable and bar.n == 4
    log.advance(6)
    log.log(6, {"loss": 1.0})
    assert (bar.n, bar.total) == (6, 10)
    log.close()
    assert log._bar is None


def test_the_progress_bar_is_silent_without_a_terminal(capfd):
    with RunLog(LoggingConfig(progress=True), is_writer=True, total_steps=10) as log:
        log.advance(5)
    assert capfd.readouterr().err == ""


def test_wandb_needs_a_folder():
    with pytest.raises(ConfigError, match=r"logging\.dir"):
        RunLog(LoggingConfig(wandb_project="p", progress=False), is_writer=True, total_steps=1)


def test_a_wandb_that_does_not_start_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match=r"wandb does not start: .*project"):
        run_steps(tmp_path, [1], wandb_project="no/such:name")


def test_wandb_is_offline_without_a_key_and_a_resume_keeps_the_run_id(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_steps(tmp_path, [1, 2], wandb_project="project", run_name="name")
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    run_steps(tmp_path, [3], resumed_step=2, wandb_project="project", run_name="name")
    assert (tmp_path / "wandb_run_id").read_text().strip() == run_id
    assert len(run_id) == 8
    stores = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert stores and all(store.stat().st_size > 0 for store in stores)
    assert any(b"loss" in store.read_bytes() and b"elapsed_s" in store.read_bytes() for store in stores)
