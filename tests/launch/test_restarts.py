"""How often a job may start again."""

import pytest

from megatron_dmtd.launch.restarts import Attempts, main, read_attempts


def attempt_at(attempts: Attempts, *steps: int) -> Attempts:
    for step in steps:
        attempts = attempts.begun(step=step)
    return attempts


@pytest.mark.parametrize(
    ("steps", "without_progress"),
    [((0,), 0), ((0, 0), 1), ((0, 0, 0), 2), ((0, 0, 5), 0), ((5, 5, 9, 9, 9), 2), ((7,), 0), ((7, 3), 1)],
    ids=str,
)
def test_only_restarts_in_a_row_without_a_newer_checkpoint_count(steps, without_progress):
    attempts = attempt_at(Attempts(), *steps)
    assert (attempts.number, attempts.step, attempts.without_progress) == (len(steps), steps[-1], without_progress)


def test_an_attempt_that_saved_may_always_be_followed_and_another_one_within_the_limit():
    stuck = attempt_at(Attempts(), 4, 4, 4)
    assert stuck.may_restart(step=5, limit=2)
    assert not stuck.may_restart(step=4, limit=2)
    assert stuck.may_restart(step=4, limit=3)
    assert not attempt_at(Attempts(), 0).may_restart(step=0, limit=0)


def checkpoint(folder, step: int) -> None:
    directory = folder / f"step_{step:08d}"
    directory.mkdir(parents=True)
    for name in ("metadata.json", "config.yaml"):
        (directory / name).touch()
    (folder / "latest").write_text(directory.name + "\n")


def test_the_command_remembers_between_attempts_and_gives_up_with_a_reason(tmp_path, capsys):
    state = tmp_path / "restarts.json"
    run = ["--", "--checkpoint.dir", str(tmp_path / "run")]
    common = ["--state", str(state), "--limit", "1"]
    assert main(["begin", *common, *run]) == 0
    assert main(["again", *common, "--status", "5", *run]) == 0
    assert main(["begin", *common, *run]) == 0
    assert main(["again", *common, "--status", "5", *run]) == 7
    assert read_attempts(state) == Attempts(number=2, step=0, without_progress=1, last_status=5)
    error = capsys.readouterr().err
    assert "1 restarts without a checkpoint after step 0; the last attempt ended with status 5" in error and "remedy: " in error
    # a job that loses nodes never gets to ask `again`: the third begin in a row at the same step is one too many
    assert main(["begin", *common, *run]) == 7
    assert read_attempts(state).last_status == 5
    checkpoint(tmp_path / "run", 12)
    assert main(["begin", *common, *run]) == 0
    assert read_attempts(state).step == 12


def test_settings_and_checkpoints_that_cannot_be_read_are_refused(tmp_path, capsys):
    common = ["begin", "--state", str(tmp_path / "s"), "--limit", "1", "--"]
    assert main([*common, "--checkpoint.folder", "x"]) == 2
    checkpoint(tmp_path / "run", 3)
    (tmp_path / "run/step_00000003/config.yaml").unlink()
    assert main([*common, "--checkpoint.dir", str(tmp_path / "run")]) == 2
    assert "unknown setting checkpoint.folder" in (error := capsys.readouterr().err) and "without config.yaml" in error
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "found"), [('{"number": 1', "cannot be read"), ("[]", "not a JSON object"), ('{"x": 1}', "'x'")]
)
def test_a_damaged_state_is_refused_by_name(tmp_path, capsys, text, found):
    (tmp_path / "s").write_text(text)
    assert main(["begin", "--state", str(tmp_path / "s"), "--limit", "1", "--", "--checkpoint.dir", str(tmp_path / "run")]) == 2
    assert found in (error := capsys.readouterr().err) and str(tmp_path / "s") in error
    assert (tmp_path / "s").read_text() == text
